"""The report on how members go together, against what their tokenizers say themselves."""

import pytest

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny
from tests.contracts import Recipe, make_ensemble, model_of, tokenizer_of

TEXT = "The cat sat on the mat , and the Hauptstadt of France is Paris"


@pytest.fixture
def ensemble():
    return Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble


def pieces(tokenizer, word):
    ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    return [token.replace("Ġ", " ").replace(tiny.SPACE_SIGN, " ") for token in tokenizer.convert_ids_to_tokens(ids)]


def test_words_of_a_text_are_cut_as_the_tokenizers_cut_them(ensemble):
    report = ensemble.compatibility(TEXT)
    words = TEXT.split()
    first, second = ensemble.tokenizers
    alike = sum(pieces(first, word) == pieces(second, word) for word in words) / len(words)
    assert 0 < alike < 1
    assert report.num_words == len(words)
    assert report.words_cut_alike == report.members[1].words_cut_alike == pytest.approx(alike)
    assert report.members[0].words_cut_alike == 1
    for member, tokenizer in zip(report.members, ensemble.tokenizers, strict=True):
        counts = [len(pieces(tokenizer, word)) for word in words]
        assert member.tokens_per_word == pytest.approx(sum(counts) / len(words))


def test_a_word_counts_as_often_as_it_occurs(ensemble):
    first, second = ensemble.tokenizers
    words = TEXT.split()
    same = next(word for word in words if pieces(first, word) == pieces(second, word))
    other = next(word for word in words if pieces(first, word) != pieces(second, word))
    assert ensemble.compatibility(f"{same} {other}\n{same} {same}").words_cut_alike == 0.75


def test_common_words_are_the_first_words_of_the_vocabularies(ensemble):
    report = ensemble.compatibility()
    words = set()
    for tokenizer in ensemble.tokenizers:
        for token in tokenizer.get_vocab():
            text = token.replace("Ġ", " ").replace(tiny.SPACE_SIGN, " ")
            if len(text) > 2 and text[0] == " " and text[1:].isalpha() and text[1:].isascii():
                words.add(text[1:])
    assert report.num_words >= len(words) > 20
    alike = sum(pieces(ensemble.tokenizers[0], w) == pieces(ensemble.tokenizers[1], w) for w in words)
    assert report.words_cut_alike == pytest.approx(alike / len(words), abs=0.1)


def test_entries_are_counted_by_what_they_write(ensemble):
    report = ensemble.compatibility()
    texts = [set(member.encoder.id_of) for member in ensemble.member_views]
    assert [member.num_entries for member in report.members] == list(map(len, texts))
    assert report.num_shared == report.members[1].shared_with_primary == len(texts[0] & texts[1])
    assert report.members[0].shared_with_primary == len(texts[0])
    assert report.union_size == len(ensemble.union_vocabulary)


def test_context_lengths_ends_and_templates_are_each_members_own():
    tokenizers = [tiny.smol_like(), tiny.gemma_like(), tiny.smol_like()]
    tokenizers[0].chat_template = tokenizers[2].chat_template = "{{ messages }}"
    models = [tiny.tiny_llama(tokenizers[0]), tiny.tiny_gemma3(tokenizers[1]), tiny.tiny_gpt2(tokenizers[2])]
    configs = [MemberConfig(name="a"), MemberConfig(name="b", eos_token_id=[2]), MemberConfig(name="c")]
    report = EnsembleForCausalLM.from_members(models, tokenizers, member_configs=configs).compatibility()
    assert [member.name for member in report.members] == ["a", "b", "c"]
    assert [member.context_length for member in report.members] == [4096, 4096, 64]
    assert report.members[0].eos_tokens == ("<|im_end|>",)
    assert report.members[1].eos_tokens == ("<eos>", "<bos>")
    assert [member.chat_template for member in report.members] == ["own", "none", "as the primary"]


def test_without_a_common_text_entry_there_is_no_share():
    tokenizers = tiny.disjoint_pair()
    ensemble = make_ensemble([tiny.tiny_llama(tokenizer) for tokenizer in tokenizers], tokenizers)
    report = ensemble.compatibility()
    assert (report.num_shared, report.num_words, report.words_cut_alike) == (0, 0, None)
    assert "words cut like the primary  -" in str(report)


def test_lengths_are_compared_only_where_asked(ensemble):
    assert [member.mean_length for member in ensemble.compatibility().members] == [None, None]
    assert "response length" not in str(ensemble.compatibility())
    report = ensemble.compatibility(responses=[["four", " four\n"], ["eight888", "eight888"]])
    assert [member.mean_length for member in report.members] == [4, 8]
    assert [member.length_ratio for member in report.members] == [1, 2]
    ran = ensemble.compatibility(prompts=["The cat", "Once upon a time"], max_new_tokens=4)
    assert all(member.mean_length > 0 for member in ran.members)


def test_an_ensemble_of_one_and_the_same_model_twice_are_wholly_alike():
    model, tokenizer = model_of("llama", "smol"), tokenizer_of("smol")
    for count in (1, 2):
        report = make_ensemble([model] * count, [tokenizer] * count).compatibility(TEXT)
        assert report.words_cut_alike == 1
        assert report.num_shared == report.members[-1].shared_with_primary == report.members[0].num_entries


def test_the_report_is_an_aligned_table_and_a_dictionary(ensemble):
    report = ensemble.compatibility(TEXT, responses=[["a"], ["b"]])
    lines = str(report).splitlines()
    assert [line[:20].rstrip() for line in lines[1:4]] == ["entries", "shared with the prim", "words cut like the p"]
    at = lines[0].index(report.members[0].name)
    assert lines[1][at:].startswith(f"{report.members[0].num_entries} ")
    assert lines[-1].endswith("of 14 words cut alike")
    values = report.to_dict()
    assert values["num_shared"] == report.num_shared
    assert values["members"][1]["name"] == report.members[1].name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": " \n"}, "`text` has no words"),
        ({"responses": [["a"]]}, "one non-empty list per member"),
        ({"responses": [["a"], []]}, "one non-empty list per member"),
        ({"responses": [["a"], ["b"]], "prompts": ["a"]}, "not both"),
        ({"prompts": []}, "`prompts` has to be a list of at least one text"),
        ({"prompts": "The cat"}, "`prompts` has to be a list"),
        ({"prompts": [3], "max_new_tokens": 2}, "prompt 0 has to be a non-empty text"),
        ({"prompts": ["a"]}, "give `max_new_tokens`"),
        ({"max_new_tokens": 3}, "no effect without `prompts`"),
        ({"temperature": 3.0}, "no effect without `prompts`"),
    ],
)
def test_bad_input_is_named(ensemble, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ensemble.compatibility(**options)

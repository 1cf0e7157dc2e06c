"""Decisions: what is recorded is what the members said, recording changes nothing, and the page is safe."""

import dataclasses
import json
import re

import pytest
import torch

from hf_ensemble import ConfigurationError, Decisions, GacConfig, MemberDecision, SweetSpanConfig, UniteConfig
from hf_ensemble.recording.decision import Decision, Entry, texts_of_pieces
from tests import tiny
from tests.bug_bank.kit import writer
from tests.contracts import CORE_RECIPES, PROMPTS, large, make_ensemble, padded, prompt_rows, small
from tests.html_page import Page, check_loads_nothing, page_in_notebook

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

NUM_NEW = 4
TOKEN_METHODS = ("gac", "unite", "deepen", "mined", "eva", GacConfig(space="log"))
each_token_method = pytest.mark.parametrize("method", TOKEN_METHODS, ids=str)
ALL_METHODS = (*TOKEN_METHODS, SweetSpanConfig(span_length=1))
each_method = pytest.mark.parametrize("method", ALL_METHODS, ids=str)


@pytest.fixture(scope="module")
def ensemble():
    return CORE_RECIPES[0].ensemble


@pytest.fixture(scope="module")
def batch(ensemble):
    return padded(prompt_rows(ensemble), fill=lambda n: ensemble.tokenizer.pad_token_id)


def scripted(*scripts, **options):
    """An ensemble whose members give these probabilities, by text, step by step."""
    tokenizers = [small(), large(), large()][: len(scripts)]
    models = []
    for script, tokenizer in zip(scripts, tokenizers, strict=True):
        ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"][0] for step in script for text in step}
        ids["EOS"] = tokenizer.eos_token_id
        steps = [{ids[text]: p for text, p in step.items()} for step in script]
        models.append(tiny.ScriptedModel(tokenizer, steps, prompt_length=1))
    return make_ensemble(models, tokenizers, **options)


def recorded(ensemble, inputs=None, **options):
    inputs = inputs if inputs is not None else ensemble.tokenizer("a", return_tensors="pt")
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, **options}
    return ensemble.generate(**inputs, return_dict_in_generate=True, output_decisions=True, **settings)


def bytes_of(ensemble, ids):
    return ensemble._members[0].encoder.token_bytes.write(ids)


# --- Recording changes nothing, and all of it is there --------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "weights"),
    [*((method, None) for method in ALL_METHODS), ("gac", (1, 0)), ("gac", (0, 1)), ("unite", (0, 1))],
    ids=str,
)
def test_recording_changes_no_id_and_the_texts_joined_are_the_text(ensemble, batch, method, weights):
    found = recorded(ensemble, batch, method=method, weights=weights)
    plain = ensemble.generate(**batch, max_new_tokens=NUM_NEW, do_sample=False, method=method, weights=weights)
    assert torch.equal(found.sequences, plain)
    assert len(found.decisions) == len(plain)
    for row, decisions in zip(plain[:, batch["input_ids"].shape[1] :].tolist(), found.decisions, strict=True):
        ids = [i for decision in decisions for i in decision.ids]
        assert ids == row[: len(ids)]
        assert set(row[len(ids) :]) <= {ensemble.tokenizer.pad_token_id}
        assert b"".join(decision.data for decision in decisions) == bytes_of(ensemble, ids)
        assert "".join(decision.text for decision in decisions) == bytes_of(ensemble, ids).decode("utf-8", "replace")


def test_a_row_that_ends_inside_a_character_has_the_text_of_its_ids():
    """The other row's spans are short, so this one's next span is decided too before it ends."""
    tokenizers, wholes = [small(), large()], ("a 🙃🙃 b c d e", "The a b c d e f")
    models = [tiny.ScriptedModel(tokenizer, writer(tokenizer, *wholes)) for tokenizer in tokenizers]
    ensemble = make_ensemble(models, tokenizers, method=SweetSpanConfig(span_length=1))
    inputs = ensemble.tokenizer(["a", "The"], return_tensors="pt", padding=True)
    width = inputs["input_ids"].shape[1]

    def criterion(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] - width >= 4, input_ids.shape[1] - width >= 8])

    output = recorded(ensemble, inputs, max_new_tokens=20, stopping_criteria=[criterion])
    assert len(output.rounds[0]) > 1
    text = "".join(decision.text for decision in output.decisions[0])
    assert text == bytes_of(ensemble, output.sequences[0, width:].tolist()).decode("utf-8", "replace")
    assert text.endswith("�")


def test_recording_changes_no_draw(ensemble, batch):
    for method in ("unite", GacConfig(strategy="mixture_sampling")):
        outputs = []
        for on in (False, True):
            torch.manual_seed(3)
            options = {"return_dict_in_generate": True, "do_sample": True, "top_k": 0, "num_return_sequences": 2}
            output = ensemble.generate(**batch, max_new_tokens=NUM_NEW, method=method, output_decisions=on, **options)
            outputs.append(output.sequences)
        assert torch.equal(*outputs)
        assert len(output.decisions) == 6
        assert [len(row) for row in output.decisions] == [len(output.decisions[n]) for n in range(6)]


@each_method
def test_a_row_alone_is_the_row_in_a_batch(ensemble, batch, method):
    whole = recorded(ensemble, batch, method=method).decisions
    for row, ids in enumerate(prompt_rows(ensemble)):
        alone = recorded(ensemble, {"input_ids": torch.tensor([ids])}, method=method).decisions
        assert alone.prompts[0] == whole.prompts[row] == PROMPTS[row]
        for a, b in zip(alone[0], whole[row], strict=True):
            assert (a.ids, a.text, a.decided_by, a.agreeing) == (b.ids, b.text, b.decided_by, b.agreeing)
            for one, other in zip(a.members, b.members, strict=True):
                assert one.probability == pytest.approx(other.probability, rel=1e-3, abs=1e-6)


# --- The numbers ----------------------------------------------------------------------------------------------------


@each_token_method
def test_numbers_are_those_of_the_members_own_softmax_along_the_text(ensemble, method):
    """The primary is asked along the text, the assistant after the prompt, as its own tokenizer encodes it."""
    [ids] = prompt_rows(ensemble, ["The cat sat"])
    output = recorded(ensemble, {"input_ids": torch.tensor([ids])}, method=method, num_decision_entries=3)
    start = len(ids)
    written = list(ids)
    kept = [ensemble._members[index].encoder.token_bytes.kinds for index in range(2)]
    for decision in output.decisions[0]:
        with torch.no_grad():
            logits = ensemble.members[0](torch.tensor([written])).logits[0, -1]
        is_out = torch.as_tensor(kept[0] == 0)
        probs = logits.masked_fill(is_out, -torch.inf).softmax(-1)
        said = decision.members[0]
        assert said.best[0].probability == pytest.approx(max_of_entries(ensemble, 0, probs), rel=1e-4)
        if len(decision.ids) == 1 and decision is not output.decisions[0][-1]:  # the last entry may be cut
            assert said.probability == pytest.approx(mass_of(ensemble, probs, decision.data), rel=1e-4, abs=1e-9)
        if len(written) == start:
            check_assistant(ensemble, ensemble.tokenizers[1]("The cat sat")["input_ids"], decision)
        written += decision.ids
    assert written == output.sequences[0].tolist()
    assert len(written) == start + NUM_NEW


def max_of_entries(ensemble, index, probs):
    """The most probable of a member's distinct texts."""
    masses = {}
    token_bytes = ensemble._members[index].encoder.token_bytes
    for i, (entry, prob) in enumerate(zip(token_bytes.entries, probs.tolist(), strict=True)):
        masses[entry or i] = masses.get(entry or i, 0.0) + prob
    return max(masses.values())


def mass_of(ensemble, probs, data):
    """What the primary gives to all its ids that write this."""
    entries = ensemble._members[0].encoder.token_bytes.entries
    return sum(prob for entry, prob in zip(entries, probs.tolist(), strict=True) if entry == data)


def check_assistant(ensemble, encoded, decision):
    with torch.no_grad():
        logits = ensemble.members[1](torch.tensor([encoded])).logits[0, -1]
    member = ensemble._members[1]
    ends = set(member.eos_token_ids)
    is_out = [kind == 0 or (kind == 2 and i not in ends) for i, kind in enumerate(member.encoder.token_bytes.kinds)]
    probs = logits.masked_fill(torch.tensor(is_out), -torch.inf).softmax(-1)
    assert decision.members[1].best[0].probability == pytest.approx(max_of_entries(ensemble, 1, probs), rel=1e-3)


def test_shares_of_a_mixture_add_up_to_its_probability():
    """GaC's mixture is the weighted sum of what the members gave to what was chosen."""
    scripts = [{"a": 0.6, "b": 0.4}], [{"b": 0.7, "c": 0.3}]
    output = recorded(scripted(*scripts, method="gac", weights=[0.25, 0.75]), max_new_tokens=2)
    for decision in output.decisions[0]:
        said = decision.members
        assert decision.text == "b"
        assert [one.probability for one in said] == pytest.approx([0.4, 0.7], abs=1e-5)
        assert decision.probability == pytest.approx(0.25 * 0.4 + 0.75 * 0.7, abs=1e-5)
        assert decision.decided_by == 1
        assert (decision.agreeing, decision.proposers, decision.agreement) == ((1,), (0, 1), 0.5)
        assert [entry.text for entry in said[0].best[:2]] == ["a", "b"]
        assert [entry.probability for entry in said[1].best[:2]] == pytest.approx([0.7, 0.3], abs=1e-5)
        assert [one.weight for one in said] == pytest.approx([0.25, 0.75])


def test_the_best_of_the_fused_distribution_is_chosen(ensemble, batch):
    output = recorded(ensemble, batch, method="unite", output_logits=True)
    for row, decisions in enumerate(output.decisions):
        for step, decision in enumerate(decisions):
            best = output.logits[step][row].softmax(-1).max()
            assert decision.probability == pytest.approx(float(best), rel=1e-4)


def test_an_entry_of_several_ids_is_one_decision_even_if_cut():
    ensemble = scripted([{"a": 0.6, "b": 0.4}], [{" capital": 0.9, "b": 0.1}, {"b": 1}], method="gac")
    ids = small()(" capital")["input_ids"]
    for length in (1, len(ids), len(ids) + 1):
        decisions = recorded(ensemble, max_new_tokens=length).decisions[0]
        assert decisions[0].ids == tuple(ids[:length])
        assert decisions[0].decided_by == 1
        assert [one.probability for one in decisions[0].members] == pytest.approx([0.0, 0.9], abs=1e-5)
        assert len(decisions) == 1 + (length > len(ids))


def test_of_an_id_that_begins_an_entry_counts_what_it_begins():
    """UniTE writes ` capital` id by id: at its first the assistant decided, with all that it gave to the entry."""
    ensemble = scripted([{"a": 0.6, "b": 0.4}], [{" capital": 0.9, "b": 0.1}], method="unite", weights=[0.4, 0.6])
    decision = recorded(ensemble, max_new_tokens=1).decisions[0][0]
    assert decision.ids == tuple(small()(" capital")["input_ids"][:1])
    assert decision.members[1].probability == pytest.approx(0.9, abs=1e-4)
    assert decision.decided_by == 1
    assert decision.agreeing == (1,)


def test_closed_gate_leaves_only_the_gate_member_heard():
    scripts = [{"a": 0.95, "b": 0.05}, {"a": 0.5, "b": 0.5}], [{"b": 1.0}]
    ensemble = scripted(*scripts, method=UniteConfig(threshold=0.9))
    first, second = recorded(ensemble, max_new_tokens=2).decisions[0]
    assert (first.is_gate_open, first.text, first.decided_by) == (False, "a", 0)
    assert first.members[1] is None
    assert first.members[0].weight == 1
    assert (second.is_gate_open, second.text, second.decided_by) == (True, "b", 1)
    assert None not in second.members


def test_mixture_sampling_says_who_was_drawn(ensemble, batch):
    method = GacConfig(strategy="mixture_sampling")
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    decisions = [d for row in recorded(ensemble, batch, method=method, **options).decisions for d in row]
    for decision in decisions:
        heard = [index for index, said in enumerate(decision.members) if said is not None]
        assert heard == [decision.decided_by]
        assert decision.members[heard[0]].weight == 1
    assert {decision.decided_by for decision in decisions} == {0, 1}


def test_one_member_alone_decides_everything(ensemble, batch):
    one = make_ensemble(list(ensemble.members)[:1], ensemble.tokenizers[:1])
    alone = recorded(one, batch).decisions
    with_another = recorded(ensemble, batch, weights=[1, 0]).decisions
    for row, other in zip(alone, with_another, strict=True):
        assert [d.members[0] for d in row] == [d.members[0] for d in other]
        assert {d.decided_by for d in row} == {0}
        assert all(d.members[1] is None for d in other)
        assert all(d.probability == pytest.approx(d.members[0].best[0].probability, rel=1e-5) for d in row)


def test_an_end_is_a_decision_with_a_name():
    ensemble = scripted([{"a": 1}, {"EOS": 0.9, "a": 0.1}], [{"a": 1}, {"EOS": 0.7, "a": 0.3}])
    for options in ({}, {"weights": [1, 0]}, {"method": "gac"}, {"method": "sweetspan"}):
        last = recorded(ensemble, **options).decisions[0][-1]
        assert (last.text[1:] if options.get("method") == "sweetspan" else last.text) == ""
        assert (last.control, last.agreement) == ("<|end|>", 1)
        assert last.label.endswith("<|end|>")


def test_members_of_one_name_are_numbered():
    ensemble = make_ensemble([tiny.ScriptedModel(small(), [{5: 1.0}])] * 2, [small()] * 2)
    for member in ensemble.member_views:
        member.name = "twin"
    assert recorded(ensemble).decisions.members == ("twin (1)", "twin (2)")


def test_long_texts_move_to_the_host_in_blocks(ensemble, batch, monkeypatch):
    whole = recorded(ensemble, batch, method="gac").decisions
    monkeypatch.setattr("hf_ensemble.recording.recorder._BLOCK", 2)
    assert recorded(ensemble, batch, method="gac").decisions == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "return_dict_in_generate"),
        ({"return_dict_in_generate": True, "num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True, "num_decision_entries": 0}, "num_decision_entries"),
    ],
)
def test_what_cannot_be_recorded_is_refused(ensemble, batch, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ensemble.generate(**batch, max_new_tokens=2, output_decisions=True, **options)


def test_characters_belong_to_the_piece_that_completes_them():
    data = "a語é".encode()
    pieces = [data[n : n + 1] for n in range(len(data))]
    assert texts_of_pieces(pieces) == ["a", "", "", "語", "", "é"]
    assert texts_of_pieces([b"a", b"\xe8\xaa"]) == ["a", "�"]


# --- Table and page -------------------------------------------------------------------------------------------------

NASTY = ["</script><script>alert(1)</script>", "<b>&amp;\"'@@data@@", "\n\t  ", "\x00\u202e\u2028", "שלום", "今天", ""]


def decisions_of(texts, members=("m-0", "<img src=x>")):
    best = (Entry("</script>", 0.5), Entry("b", 0.25))
    said = (MemberDecision(0.5, 0.5, best, True, True), None)
    row = tuple(Decision((7,), text.encode(), text, "", 0.3, 0, None, said) for text in texts)
    return Decisions((row, row), members, ("<i>prompt</i>", ""))


def test_table_has_a_line_for_each_decision_and_member(ensemble, batch):
    pytest.importorskip("pandas")
    decisions = recorded(ensemble, batch, method=UniteConfig(threshold=0.5)).decisions
    frame = decisions.to_dataframe()
    assert len(frame) == 2 * sum(map(len, decisions))
    assert frame.groupby("row")["decision"].nunique().tolist() == [len(row) for row in decisions]
    line = frame.iloc[3]
    decision = decisions[0][1]
    assert (line["text"], line["start"], line["member"]) == (decision.text, len(decisions[0][0].ids), "member-1")
    assert line["is_heard"] == (decision.members[1] is not None)
    closed = frame[~frame["is_gate_open"].astype(bool) & (frame["member"] == "member-1")]
    assert closed["member_probability"].isna().all()
    assert frame.dtypes["weight"] == "float64"
    assert len(decisions_of([]).to_dataframe()) == 0


def test_table_without_pandas_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigurationError, match='pip install "pandas>=2.2"'):
        decisions_of(["a"]).to_dataframe()


class DecisionsPage(Page):
    """Also what stands in the pieces of text."""

    def __init__(self, source):
        self.pieces = []
        super().__init__(source)

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        if tag == "span" and "d" in self.open[-1][1].split():
            self.pieces.append("")

    def handle_data(self, data):
        super().handle_data(data)
        if any(tag == "span" and "d" in kind.split() for tag, kind in self.open):
            self.pieces[-1] += data


def page_of(decisions, tmp_path):
    decisions.to_html(tmp_path / "page.html", title="<u>")
    return (tmp_path / "page.html").read_text("utf-8")


def test_page_shows_any_text_as_text(tmp_path):
    source = page_of(decisions_of(NASTY), tmp_path)
    page = DecisionsPage(source)
    assert page.tags.count("script") == 2
    assert not {"img", "u", "link", "iframe"} & set(page.tags)
    assert page.pieces == [text.replace("\x00", "\u2400") for text in NASTY] * 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', source)[1])
    assert data["members"] == ["m-0", "<img src=x>"]
    assert data["rows"][0][0][5][0][4] == [["</script>", 0.5], ["b", 0.25]]


def test_page_loads_nothing(ensemble, batch, tmp_path):
    decisions = recorded(ensemble, batch, method="gac").decisions
    source = page_of(decisions, tmp_path)
    check_loads_nothing(source)
    texts = ["".join(d.text + d.control for d in row) for row in decisions]
    pictured = str.maketrans({chr(n): chr(0x2400 + n) for n in range(32) if chr(n) not in "\t\n"})
    assert "".join(DecisionsPage(source).pieces) == "".join(texts).translate(pictured)


def test_page_of_spans_and_of_nothing(ensemble, batch, tmp_path):
    assert "spans" in page_of(recorded(ensemble, batch, method="sweetspan").decisions, tmp_path)
    assert "0 decisions" in page_of(decisions_of([]), tmp_path)


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(tmp_path):
    decisions = decisions_of(NASTY)
    source, height = page_in_notebook(decisions._repr_html_())
    decisions.to_html(tmp_path / "page.html")
    assert source == (tmp_path / "page.html").read_text("utf-8")
    assert page_in_notebook(decisions_of([])._repr_html_())[1] < height


def test_a_notebook_shows_the_first_texts_of_many():
    decisions = decisions_of(["a"])
    many = dataclasses.replace(decisions, rows=decisions.rows * 25, prompts=decisions.prompts * 25)
    page = DecisionsPage(page_in_notebook(many._repr_html_())[0])
    assert "Decisions: 20 of 50 texts" in page.texts
    assert page.pieces == ["a"] * 20

"""Members of other kinds in a batch that rows join and leave: each row writes what a call of its own writes."""

import pytest

from hf_ensemble import EnsembleForCausalLM, GacConfig, MemberConfig
from hf_ensemble.modes.shared import NotShared
from tests import tiny
from tests.completions_server import serving
from tests.decoding.test_running_batch import JOINING, LENGTHS, PROMPTS, Asked, run
from tests.serving.conftest import client_of, text_alone
from tests.serving.conftest import served as served_app
from tests.tiny_encoder_decoders import nllb_like, t5_like, tiny_nllb, tiny_t5

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

slow = pytest.mark.slow


GONE, GOES_AT = 2, 5
"""The row that is given up, and before which step."""


def assert_rows_write_what_they_write_alone(ensemble, **options):
    """Rows of several lengths join a running batch; the one that is given up has written the beginning of its text."""
    asked = [Asked(ensemble, prompt, max_new_tokens=n, **options) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)]
    assert max(run(asked, JOINING, {GOES_AT: [GONE]})) > 2
    for n, one in enumerate(asked):
        alone = one.alone(ensemble)
        assert one.ids == (alone[: len(one.ids)] if n == GONE else alone)
        assert one.steps[-1].ends == (n != GONE)


MAKERS = {"nllb": (nllb_like, tiny_nllb), "t5": (t5_like, tiny_t5)}


@pytest.mark.parametrize(
    ("kind", "method"),
    [("nllb", "unite"), *(pytest.param(*one, marks=slow) for one in [("t5", "unite"), ("t5", "gac")])],
)
def test_with_an_encoder_decoder_assistant(kind, method):
    tokenizer, model = MAKERS[kind]
    tokenizers = [tiny.smol_like(), tokenizer()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), model(tokenizers[1], seed=2)]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers, method=method)
    assert_rows_write_what_they_write_alone(ensemble)


@slow
@pytest.mark.parametrize("method", ["unite", "gac", GacConfig(threshold=0.02, gate=1)], ids=["unite", "gac", "gate"])
def test_with_adapters_that_share_their_weights(method, tmp_path):
    pytest.importorskip("peft")
    from tests.hub.test_shared_adapters import folders, members_of

    ensemble = EnsembleForCausalLM.from_pretrained(members_of(folders(tmp_path))[:3], method=method)
    assert_rows_write_what_they_write_alone(ensemble)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "smol", "gemma")


@pytest.mark.parametrize("served", [(1,), *(pytest.param(one, marks=slow) for one in [(0,), (0, 1)])], ids=str)
def test_with_members_behind_a_server(served, saved, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    here = EnsembleForCausalLM.from_pretrained(saved)
    with (
        serving(here.members[0], here.tokenizers[0], name="smol") as smol,
        serving(here.members[1], here.tokenizers[1], name="gemma") as gemma,
    ):
        items = [
            MemberConfig(url=server.url, model=name, tokenizer=folder) if n in served else MemberConfig(folder)
            for n, (server, name, folder) in enumerate(zip((smol, gemma), ("smol", "gemma"), saved, strict=True))
        ]
        with EnsembleForCausalLM.from_pretrained(items, method="unite") as ensemble:
            assert_rows_write_what_they_write_alone(ensemble)
            with pytest.raises(NotShared, match="constraints .* list only a few ids"):
                Asked(ensemble, PROMPTS[0], max_new_tokens=2, repetition_penalty=1.4)
            # The server lets it be a call of its own.
            options = {"model": "both", "prompt": "The cat", "max_tokens": 4, "frequency_penalty": 0.5}
            with served_app(ensemble) as (_, address), client_of(address) as client:
                answer = client.completions.create(**options)
            assert answer.choices[0].text == text_alone(ensemble, "The cat", max_new_tokens=4, repetition_penalty=1.5)

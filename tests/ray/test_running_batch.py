"""Members in actors, in a batch that rows join and leave."""

import pytest

from hf_ensemble import EnsembleForCausalLM, MemberConfig
from tests.decoding.test_running_batch_members import assert_rows_write_what_they_write_alone
from tests.ray.conftest import FAR, end, process_of, wait_until_ended
from tests.serving.conftest import client_of, served, text_alone

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}], ids=["plain", "constrained"])
def test_rows_write_what_they_write_alone(options, there):
    """The actors send few entries, or whole rows where constraints need them."""
    assert_rows_write_what_they_write_alone(there, **options)


@pytest.mark.slow
def test_a_server_outlives_an_actor(folders):
    """Who is answered meanwhile gets an error that names the member; once it is back, so are the answers."""
    with EnsembleForCausalLM.from_pretrained([folders[0], MemberConfig(path=folders[1], ray=FAR)]) as ensemble:
        expected = text_alone(ensemble, "The cat", max_new_tokens=6)
        with served(ensemble) as (_, address), client_of(address) as client:

            def complete():
                return client.completions.create(model="both", prompt="The cat", max_tokens=6).choices[0].text

            assert complete() == expected
            process = process_of(ensemble.member_views[1])
            end(process)
            wait_until_ended(process)
            with pytest.raises(openai.InternalServerError, match="member 'gemma'"):
                complete()
            ensemble.restart_member("gemma")
            assert complete() == expected

"""The conversation in the terminal."""

import json

import pytest

from hf_ensemble import EnsembleForCausalLM, cli

# Random members write anything.
pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

ARGUMENTS = ["chat", "--members", "my-chat", "--max-new-tokens", "5"]


@pytest.fixture
def talk(here, tmp_path, monkeypatch, capsys):
    """Run a chat on lines of input; gives the exit code, stdout, and the conversation that was saved last."""
    saved = tmp_path / "saved.json"

    def run(*lines, arguments=()):
        given = iter([*lines, f"/save {saved}"])

        def read(prompt=""):
            for line in given:
                if line is KeyboardInterrupt:
                    raise KeyboardInterrupt
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        code = cli.main([*ARGUMENTS, *arguments])
        messages = json.loads(saved.read_text("utf-8")) if saved.exists() else None
        return code, capsys.readouterr().out, messages

    return run


@pytest.fixture(scope="module")
def ensemble(member_folder):
    return EnsembleForCausalLM.from_pretrained(member_folder / "my-chat")


def answer_to(messages, ensemble):
    inputs = ensemble.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = ensemble.generate(**inputs, max_new_tokens=5, do_sample=False)
    return ensemble.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_each_answer_knows_what_was_said(talk, ensemble):
    code, out, messages = talk("Hi", "And you?", arguments=["--system", "Be brief."])
    assert code == 0
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == answer_to(messages[:2], ensemble)
    assert messages[4]["content"] == answer_to(messages[:4], ensemble)
    assert out == f"{messages[2]['content']}\n{messages[4]['content']}\n"


def test_reset_keeps_the_system_message_and_system_changes_it(talk):
    assert talk("Hi", "/reset", arguments=["--system", "A"])[2] == [{"role": "system", "content": "A"}]
    assert talk("/system B")[2] == [{"role": "system", "content": "B"}]
    assert talk("/system", arguments=["--system", "A"])[2] == []


def test_unknown_commands_are_explained_and_exit_ends(talk, capsys):
    code, out, messages = talk("/nonsense", "/exit", "Hi")
    assert (code, out, messages) == (0, "", None)


def test_ctrl_c_interrupts_the_answer_and_keeps_what_was_shown(talk, ensemble, monkeypatch):
    generate = EnsembleForCausalLM.generate

    def interrupted(self, *args, streamer, **options):
        class Stop:
            num_puts = 0

            def put(self, value):
                self.num_puts += 1
                if self.num_puts == 4:
                    raise KeyboardInterrupt
                streamer.put(value)

            def end(self):
                streamer.end()

        return generate(self, *args, streamer=Stop(), **options)

    with monkeypatch.context() as patch:
        patch.setattr(EnsembleForCausalLM, "generate", interrupted)
        code, out, messages = talk("Hi")
    assert code == 0
    whole = answer_to(messages[:1], ensemble)
    assert messages[1]["content"]
    assert whole.startswith(messages[1]["content"])
    assert len(messages[1]["content"]) < len(whole)
    assert out == messages[1]["content"] + "\n"


def test_in_a_terminal_errors_and_ctrl_c_at_the_prompt_do_not_end_it(talk, monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    code, _, messages = talk(KeyboardInterrupt, "/save /nowhere/at/all.json", "Hi")
    assert code == 0
    assert [message["role"] for message in messages] == ["user", "assistant"]
    code, _, messages = talk("Hi", arguments=["--set", "guidance_scale=2"])
    assert (code, messages) == (0, [])


def test_without_a_terminal_ctrl_c_ends_it(talk):
    assert talk(KeyboardInterrupt)[0] == 130

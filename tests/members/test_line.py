"""The line to an actor, without Ray."""

import socket
import threading
import time

import pytest

from hf_ensemble.errors import MemberError
from hf_ensemble.members.ray.line import AnsweringLine, AskingLine, Failure, Number


def handler(what, arguments):
    if what == "raise":
        raise MemberError("member 'a' returned NaN")
    if what == "break":
        return 1 / 0
    return what, arguments


@pytest.fixture(scope="module")
def number():
    line = AnsweringLine("127.0.0.1")
    threading.Thread(target=line.answer, args=(handler,), daemon=True).start()
    return line.number


def test_answers_come_to_whoever_asked_also_where_an_earlier_one_is_given_up(number):
    line = AskingLine(number)
    line.ask("given up", ())
    asked = [line.ask("number", (n, b"x" * 100_000)) for n in range(3)]
    assert [one.result(10)[1][0] for one in reversed(asked)] == [2, 1, 0]
    line.close()


def test_errors_of_this_package_keep_their_kind_and_others_are_told(number):
    line = AskingLine(number)
    assert line.ask("raise", ()).result(10) == Failure(
        MemberError, ("member 'a' returned NaN",), "MemberError: member 'a' returned NaN"
    )
    assert line.ask("break", ()).result(10).text == "ZeroDivisionError: division by zero"
    line.close()


def test_a_line_that_is_dead_says_so_to_whoever_waits(number):
    line = AskingLine(number)
    line.close()
    until = time.monotonic() + 10
    while time.monotonic() < until and not isinstance(line.ask("x", ()).exception(10), ConnectionError):
        time.sleep(0.01)
    assert isinstance(line.ask("x", ()).exception(10), ConnectionError)


def test_strangers_get_nothing_and_keep_nobody_waiting(number):
    silent = socket.create_connection(number.address)
    with pytest.raises(Exception, match="digest"):
        AskingLine(Number(number.address, b"another key"))
    line = AskingLine(number)
    assert line.ask("x", (1,)).result(10) == ("x", (1,))
    line.close()
    silent.close()
    assert number.key.hex() not in repr(number)
    assert repr(number.key) not in repr(number)

"""Make the study's sets from the original files: training questions, development sets, and half of each test set.

    python examples/study/prepare.py --qamr QAMR --xquad XQUAD --gsm8k GSM8K    # folders: clones, at the commits below
    python examples/study/prepare.py --open DATA                                # TriviaQA and NQ, for members as they are
    python examples/study/prepare.py --small                                    # a made-up world, for trying the stages

QAMR: https://github.com/uwnlp/qamr at 956b0eb. XQuAD: https://github.com/google-deepmind/xquad at 7d30520. GSM8K:
https://github.com/openai/grade-school-math at 3101c7d.

QAMR's questions are about one sentence among 0 to 4 others. No document is in more than one of its sets. Test sets are
cut in halves by a hash of the sentence, paragraph or problem that an example is about. The study reports on half `a`;
the other half is kept to check the study's findings.

DATA is a folder of development sets, as for `examples/evaluation_sets.py`. Worked examples precede its questions; no
text with the answer is given.
"""

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import made_up

SHA256 = {
    "qa_train": "dc1a679a410b", "qa_dev": "b745018f29d9", "qamr_test_a": "e0093991e384", "squad_test_a": "18f51eea3511",
    "gsm_train": "147782352357", "gsm_dev": "d94dd8ae278a", "gsm_test_a": "23727313e9ff",
}  # fmt: skip
"""How the hashes of the original files begin."""

BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
OPENING = {"``", "-LRB-", "-LSB-", "-LCB-", "$", "#", "£", "€", "(", "["}
CLOSING = {"''", "-RRB-", "-RSB-", "-RCB-", ",", ".", ";", ":", "?", "!", "%", ")", "]", "'", "n't"}
CLITIC = re.compile(r"'(s|re|ve|ll|d|m|S)")


class Sizes(NamedTuple):
    """How much of QAMR to hold out."""

    test_sentences: int = 240
    dev_sentences: int = 40
    test_questions: int = 1500
    dev_questions: int = 300


Questions = dict[str, list[tuple[str, list[str]]]]
"""By sentence: questions with the annotators' answers, not sorted by frequency."""


def join_tokens(tokens: Iterable[str]) -> str:
    """Join Penn Treebank tokens to ordinary text."""
    text, sticks = "", True
    for token in tokens:
        is_closing = token in CLOSING or CLITIC.fullmatch(token)
        written = '"' if token in ("``", "''") else BRACKETS.get(token, token)
        text += written if sticks or is_closing else " " + written
        sticks = token in OPENING
    return text.strip()


def read_sentences(file: Path) -> dict[str, list[str]]:
    lines = file.read_text("utf-8").rstrip("\n").split("\n")
    return {name: text.split(" ") for name, _, text in (line.partition("\t") for line in lines)}


def read_questions(file: Path, sentences: dict[str, list[str]]) -> Questions:
    questions: Questions = {}
    for line in file.read_text("utf-8").rstrip("\n").split("\n"):
        fields = line.split("\t")
        name, question, spans = fields[0], fields[5].strip(), [fields[6], *(f.split(":", 1)[1] for f in fields[7:])]
        answers = [
            join_tokens(sentences[name][int(place)] for place in span.split())
            for span in spans
            if re.fullmatch(r"[\d ]+", span)  # otherwise the annotator said that there is no answer
        ]
        answers = [answer for answer in answers if re.search(r"\w", answer)]
        if answers and question:
            questions.setdefault(name, []).append((re.sub(r"\s+([?.,!])", r"\1", question), answers))
    return questions


def document_of(sentence: str) -> str:
    return ":".join(sentence.split(":")[:3])


def hold_out(questions: Questions, num_sentences: int, rng: random.Random) -> list[str]:
    """Draw whole documents until there are enough sentences."""
    documents = sorted({document_of(sentence) for sentence in questions})
    rng.shuffle(documents)
    held: set[str] = set()
    count = 0
    for document in documents:
        if count < num_sentences:
            held.add(document)
            count += sum(document_of(sentence) == document for sentence in questions)
    return [sentence for sentence in questions if document_of(sentence) in held]


def ask(
    names: list[str],
    pool: list[str],
    questions: Questions,
    texts: dict[str, str],
    rng: random.Random,
    most: int | None,
) -> list[dict]:
    """Make examples about sentences, each among 0 to 4 sentences from a pool, in random order."""
    examples = []
    for name in names:
        own = texts[name]
        asked = questions[name]
        for question, answers in asked if most is None else rng.sample(asked, min(most, len(asked))):
            count = rng.randint(0, 4)
            context = rng.sample([text for text in rng.sample(pool, 8) if text != own], count)
            context.insert(rng.randint(0, count), own)
            times = Counter(answers)
            target = max(answers, key=lambda answer: times[answer])
            prompt = f"Context: {' '.join(context)}\nQuestion: {question}\nAnswer:"
            accepted = [target, *(answer for answer in dict.fromkeys(answers) if answer != target)]
            examples.append({"cluster": name, "prompt": prompt, "answers": accepted})
    rng.shuffle(examples)
    return examples


def qamr(folder: Path, rng: random.Random, sizes: Sizes) -> dict[str, list[dict]]:
    data = folder / "data"
    sentences = read_sentences(data / "wiki-sentences.tsv")
    dev, test = (read_questions(data / "filtered" / f"{part}.tsv", sentences) for part in ("dev", "test"))
    for_test = hold_out(test, sizes.test_sentences, rng)
    for_dev = hold_out(dev, sizes.dev_sentences, rng)
    held = {document_of(name) for name in (*for_test, *for_dev)}
    # QAMR's own training set is not needed: the rest of the other sets is enough.
    rest = [name for name in (*dev, *test) if document_of(name) not in held]
    texts = {name: join_tokens(tokens) for name, tokens in sentences.items()}
    pool = [text for name, text in texts.items() if document_of(name) not in held]
    questions = {**dev, **test}
    return {
        "qa_train": ask(rest, pool, questions, texts, rng, None),
        "qa_dev": ask(for_dev, [texts[n] for n in for_dev], questions, texts, rng, 10)[: sizes.dev_questions],
        "qamr_test": ask(for_test, [texts[n] for n in for_test], questions, texts, rng, 7)[: sizes.test_questions],
    }


def squad(folder: Path) -> list[dict]:
    examples = []
    for article in json.loads((folder / "xquad.en.json").read_text("utf-8"))["data"]:
        for n, paragraph in enumerate(article["paragraphs"]):
            context = paragraph["context"].strip()
            for asked in paragraph["qas"]:
                prompt = f"Context: {context}\nQuestion: {asked['question'].strip()}\nAnswer:"
                answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                examples.append({"cluster": f"{article['title']}#{n}", "prompt": prompt, "answers": answers})
    return examples


def gsm(folder: Path, part: str) -> list[dict]:
    examples = []
    with (folder / "grade_school_math" / "data" / f"{part}.jsonl").open(encoding="utf-8") as file:
        for n, line in enumerate(file):
            problem = json.loads(line)
            answer = re.sub(r"<<.*?>>", "", problem["answer"]).strip()  # GSM8K's calculator annotations
            prompt = f"Question: {problem['question'].strip()}\nAnswer:"
            examples.append({"cluster": f"{part}{n}", "prompt": prompt, "answers": [answer]})
    return examples


def open_questions(data: Path, name: str) -> list[dict]:
    head = (data / f"{name}_prompt.txt").read_text("utf-8").rstrip() + "\n\n"
    examples = []
    for n, line in enumerate((data / f"{name}_dev.jsonl").read_text("utf-8").rstrip("\n").split("\n")):
        record = json.loads(line)
        answers = [record["answer"]] if isinstance(record["answer"], str) else record["answer"]
        prompt = f"{head}Question: {record['question']}\nAnswer:"
        examples.append({"cluster": f"{name} {n}", "prompt": prompt, "answers": answers})
    return examples


def half_of(examples: list[dict], half: str) -> list[dict]:
    return [x for x in examples if "ab"[int(hashlib.sha256(x["cluster"].encode()).hexdigest(), 16) % 2] == half]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("qamr", "xquad", "gsm8k"):
        parser.add_argument(f"--{name}", type=Path, help="a clone of its repository")
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study; the sets go to its `sets`")
    parser.add_argument("--half", choices=("a", "b"), default="a", help="of the test sets")
    parser.add_argument("--open", type=Path, help="a folder of development sets: these alone are made")
    parser.add_argument("--small", action="store_true", help="a made-up world instead")
    args = parser.parse_args()
    if args.open is not None:
        write(args.folder, {f"{name}_dev": open_questions(args.open, name) for name in ("triviaqa", "nq")}, True)
        return
    sizes = Sizes()
    if args.small:
        sizes = made_up.SIZES
        args.qamr = args.xquad = args.gsm8k = made_up.write_originals(args.folder / "originals")
    elif None in (args.qamr, args.xquad, args.gsm8k):
        parser.error("--qamr, --xquad and --gsm8k are needed, or --small")

    rng = random.Random(20261129)
    sets = qamr(args.qamr, rng, Sizes(*sizes))
    problems = gsm(args.gsm8k, "train")
    rng.shuffle(problems)
    sets |= {"gsm_dev": problems[: sizes[3]], "gsm_train": problems[sizes[3] :]}
    for name, examples in (
        ("qamr", sets.pop("qamr_test")),
        ("squad", squad(args.xquad)),
        ("gsm", gsm(args.gsm8k, "test")),
    ):
        sets[f"{name}_test_{args.half}"] = half_of(examples, args.half)

    write(args.folder, sets, args.small)


def write(folder: Path, sets: dict[str, list[dict]], may_differ: bool) -> None:
    (folder / "sets").mkdir(parents=True, exist_ok=True)
    for name, examples in sets.items():
        data = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples).encode()
        (folder / "sets" / f"{name}.jsonl").write_bytes(data)
        as_known = hashlib.sha256(data).hexdigest().startswith(SHA256.get(name, ""))
        print(f"{name}: {len(examples)}" + ("" if as_known or may_differ else ", NOT what the study had"))


if __name__ == "__main__":
    main()

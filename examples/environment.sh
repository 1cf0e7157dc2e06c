# Sourced by examples/quickstart.sh and tests/run.sh, in the root of the checkout.

# bare_environment FOLDER: a new virtual environment with nothing but pip.
bare_environment() {
    local folder=$1
    rm -rf "$folder"
    python3 -m venv "$folder" 2>/dev/null && return
    echo "python3 -m venv does not work here (Debian: package python3-venv), trying virtualenv instead"
    rm -rf "$folder"
    python3 -m pip install -qq --target "$folder-virtualenv" virtualenv || return 1
    PYTHONPATH="$folder-virtualenv" python3 -m virtualenv --quiet "$folder"
}

# make_environment FOLDER ARGUMENT...: a virtual environment with this checkout and what the arguments of `pip install`
# say. It is kept until the arguments, the requirements in pyproject.toml, the Python version or the checkout change.
make_environment() {
    local folder=$1 wanted
    shift
    wanted="$(pwd; python3 --version; printf '%s\n' "$@"; sed '/^\[tool/,$d' pyproject.toml)"
    if [ "$(cat "$folder/made-for" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    bare_environment "$folder" || return 1
    # Twice quiet: warnings about package indexes are not for the user. Bytecode is left to the imports, which need
    # little of it.
    local pip=("$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-compile)
    echo "$folder: pip"
    "${pip[@]}" --upgrade "pip>=25.1" || return 1 # the first with `--group`
    echo "$folder: torch"
    "${pip[@]}" "torch==2.13.0" || return 1 # without a pin, pip may prefer a CUDA build, gigabytes larger
    echo "$folder: hf_ensemble and what it needs"
    "${pip[@]}" "torch==2.13.0" --editable . "$@" || return 1
    printf '%s\n' "$wanted" >"$folder/made-for"
}

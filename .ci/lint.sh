# ./dev lint: the linters, which .ci/run runs first. dev sources this file.

# check TOOL ARGUMENT...: notes a failure. A missing tool is an error except with --python.
check() {
  if command -v "$1" >/dev/null; then
    say "$1 $2"
    "$@" || LINT_FAILED=1
  else
    [[ -n $ASKED_PYTHON ]] || die "$1 is missing although requirements-dev.txt lists it"
    say "$1: not installed here, skipped"
  fi
}

verb_lint() {
  prepare_python
  cd -- "$ROOT"
  local cpp=() LINT_FAILED=0 mypy script
  mapfile -t cpp < <(find csrc tests/abi tests/cpp tests/standins -name '*.h' -o -name '*.cpp' -o -name '*.inc')
  if [[ ${1:-} == --fix ]]; then
    check ruff check --quiet --fix .
    check ruff format --quiet .
    check clang-format -i "${cpp[@]}"
    return
  fi
  (check mypy --python-executable "$PYTHON" && exit "$LINT_FAILED") &
  mypy=$!
  check ruff check --quiet .
  check ruff format --quiet --check .
  check clang-format --dry-run -Werror "${cpp[@]}"
  NO_MKDOCS_2_WARNING=1 check mkdocs build --strict
  # Configures only. csrc/kernels has no locks, and clang does not know all of its vectors. csrc/backend and
  # csrc/device are read as they are compiled, several files together (Unity).
  need_compiler
  mkdir -p build
  cmake --preset lint -DMYCOLL_PYTHON="$PYTHON" >build/lint.log 2>&1 || { cat build/lint.log >&2; LINT_FAILED=1; }
  check run-clang-tidy.py -p build/lint -quiet -hide-progress -j "$(nproc)" \
    '/csrc/(base|transport|collectives|observe|engine|nccl)/' '/Unity/' >&2
  wait "$mypy" || LINT_FAILED=1
  for script in dev .ci/run .ci/*.sh; do bash -n "$script" || LINT_FAILED=1; done
  if command -v shellcheck >/dev/null; then check shellcheck -s bash dev .ci/run .ci/*.sh; fi
  [[ $LINT_FAILED == 0 ]] || die "lint found something; ./dev lint --fix repairs formats"
}

# ./dev sanitize: C++ tests under TSan, then ASan with UBSan. dev sources this file.

verb_sanitize() {
  local kind word variant="" is_build="" failed=0 options=()
  prepare_python
  cd -- "$ROOT"
  case "${1:-}" in
    --short)
      variant=-short && shift
      if [[ ${1:-} == --build ]]; then is_build=1 && shift; fi
      [[ $# == 0 ]] || die "./dev sanitize --short has tests of its own: leave out $*"
      ;;
    --device)  # arguments are for pytest
      variant=-device options=(-DMYCOLL_PYTHON="$PYTHON") && shift
      export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} ${*@Q}" && set --
      ;;
  esac
  for kind in tsan asan; do
    say "building for $kind$variant"
    BUILD=(--preset "$kind$variant")
    cmake_build "$kind$variant" "$ROOT/build/$kind$variant" "${options[@]}"
    [[ -z $is_build ]] || continue
    for word in "$@"; do
      [[ $(ctest --preset "$kind" -N -R "$word") != *"Total Tests: 0"* ]] || die "no C++ test has '$word' in its name"
    done
    ctest --preset "$kind$variant" ${1:+-R "$(IFS='|' && echo "$*")"} || failed=1
  done
  [[ $failed == 0 ]] || die "a sanitizer found something"
}

# ./dev soak: long random tests. dev sources this file.

verb_soak() {
  local tests="(simulation|formation_walk|fuzz|handshake_fuzz|plan)_test\\." seeds=5000 inputs=100000 worlds=5000 restarts=200
  if [[ ${1:-} == --short ]]; then
    shift
    # The plans that are random; the suite has run the others.
    tests="(simulation|fuzz|handshake_fuzz)_test\\."
    tests+="|plan_test\\.Plan\\.(isRightForRandomWorlds|isRightForRootsOfLargeWorlds|exchangesBlocksOfAllSizes)"
    seeds=100 inputs=250 worlds=100 restarts=0
  fi
  build
  export FUZZ_SEEDS="${FUZZ_SEEDS:-$inputs}" SIMULATION_SEEDS="${SIMULATION_SEEDS:-$seeds}"
  export PLAN_WORLDS="${PLAN_WORLDS:-$worlds}" SOAK_RESTARTS="${SOAK_RESTARTS:-$restarts}"
  MYCOLL_LOG=off nice ctest --test-dir "$TREE" -R "^($tests)" -j 4 --timeout 1000000 \
    --output-on-failure --no-tests=error || die "a simulated network or an input of the fuzz tests found something"
  [[ $SOAK_RESTARTS != 0 ]] || return 0
  # Ranks that hardly wait for each other find in minutes what otherwise takes a busy machine and days.
  (cd -- "$ROOT" && BUILD=(--preset hasty) && cmake_build hasty build/hasty)
  MYCOLL_LOG=off nice ctest --test-dir "$ROOT/build/hasty" -R "^(simulation|formation_walk)_test\\." -j 4 \
    --timeout 1000000 --output-on-failure --no-tests=error || die "hasty ranks found something"
  ELASTIC_STEPS="${ELASTIC_STEPS:-1000}" nice "$PYTHON" -m pytest --rootdir "$ROOT" --timeout 0 \
    "$ROOT/tests/test_elastic_walk.py" -k any_walk || die "a walk of an elastic group found something"
  PYTHONPATH="$ROOT/tests:$PYTHONPATH" exec nice "$PYTHON" -m faults --backend mycoll --only 16 "$@"
}

# ./dev gpu: tests/gpu on a machine with a GPU, or on stand-ins. dev sources this file.

verb_gpu() {
  local target=site
  prepare_python
  export PYTHONPATH="$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
  if [[ " $* " == *" --rehearse "* ]]; then
    target=rehearsal
  elif [[ " $* " == *" --device standin "* ]]; then
    target=all
  else  # before minutes of building
    "$PYTHON" -c 'import torch; exit(not torch.cuda.is_available())' ||
      CODE=2 die "./dev gpu needs a GPU (nvidia-smi lists them) and a torch with CUDA (--python PATH)"
  fi
  build "$target"
  cd -- "$ROOT"
  exec "$PYTHON" -m gpu "$@"
}

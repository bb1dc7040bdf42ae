# For ./dev test --clients. dev sources this file.

# The libraries of tests/clients, in an environment of their own that sees the packages of $PYTHON. Sets PYTHON.
prepare_clients() {
  local venv="$TREE/clients" list="$ROOT/requirements-clients.txt"
  local where='import sysconfig; print(sysconfig.get_path("purelib"))'
  if ! cmp -s "$list" "$venv/installed"; then
    say "installing the libraries of requirements-clients.txt (once)"
    "$PYTHON" -m venv "$venv"
    "$PYTHON" -c "$where" >"$("$venv/bin/python" -c "$where")/base.pth"
    # DeepSpeed looks for torch while it is built, hence no isolation.
    "$venv/bin/python" -m pip install --disable-pip-version-check -q --no-build-isolation -r "$list" -c <(
      "$PYTHON" -c 'from importlib.metadata import version as v; print("torch==" + v("torch"))'
    ) || die "pip could not install the libraries; its message stands above"
    cp "$list" "$venv/installed"
  fi
  PYTHON="$venv/bin/python"
}

"""Fills TREE/site, from which Python imports the mycoll of a build tree: links to the files of
python/mycoll and to the tree's compiled module, and the metadata in which torch finds entry points.
Several build trees can use one checkout at the same time; an editable install uses only one.

    python tests/stage.py TREE      (the target "site" of CMakeLists.txt)
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/mycoll"

tree = Path(sys.argv[1]).resolve()
site = tree / "site/mycoll"
site.mkdir(parents=True, exist_ok=True)
# Files that an editable install has put into the package belong to another tree.
sources = [
    p for p in PACKAGE.iterdir() if not re.match(r"torch[0-9]|libmycoll|__pycache__$", p.name)
]
wanted = {p.name: p for p in [*sources, *(tree / "module").glob("*")]}
for link in site.iterdir():
    if link.is_symlink() and wanted.get(link.name) != link.readlink():
        link.unlink()
for name, source in wanted.items():
    if not (site / name).is_symlink():
        (site / name).symlink_to(source)

names: dict = {}
exec((PACKAGE / "_version.py").read_text(), names)
version = names["__version__"]
project = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no tomllib
groups = re.findall(r'^\[project\.entry-points\."(.+?)"\]\n((?:\w.*\n)+)', project, re.MULTILINE)
groups += re.findall(r"^\[project\.(scripts)\]\n((?:\w.*\n)+)", project, re.MULTILINE)
text = "".join(f"[{group}]\n{lines}\n" for group, lines in groups).replace('"', "")
info = tree / f"site/mycoll-{version}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mycoll\nVersion: {version}\n")
(info / "entry_points.txt").write_text(text.replace("[scripts]", "[console_scripts]"))

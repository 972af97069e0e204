"""Sphinx settings; build with ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import csd_policy

project = "csd-policy"
author = "The csd-policy authors"
copyright = "2026, The csd-policy authors"
version = release = csd_policy.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build", "results"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"csd-policy {release}"

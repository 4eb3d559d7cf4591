# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#
# How sphinx renders these documents: see "make doc".

project = "umad-rs"
copyright = "the authors of umad-rs"
master_doc = "index"
exclude_patterns = ["pictures"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "fixed_sidebar": True}
html_copy_source = False
highlight_language = "none"

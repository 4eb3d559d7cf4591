# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034,SC2154 # variables of and for the others
#
# The linters, each one a check. They need the set-up and lint_ready; they run inside the root. Sourced.

# shellcheck source=side-root.sh
. "$here/side-root.sh"
# shellcheck source=doc.sh
. "$here/doc.sh"

# lint_ready: what linters need besides
lint_ready() { documents_ready; }

# rust_files, shell_files: what is to be looked at, ended by NUL
rust_files() { find "$TOP" \( -name .git -o -name target \) -prune -o -name '*.rs' ! -name 'bindings_*.rs' -print0; }
shell_files() {
	find "$TOP" -name .git -prune -o -name target -prune -o -type f -size -200k -print0 |
		xargs -0 awk 'FNR == 1 && (/^#!.*(ba|da|\/)sh/ || FILENAME ~ /\.sh$/) { printf "%s%c", FILENAME, 0 } FNR > 1 { nextfile }'
}

# lint_rustfmt [OPTION...]: all Rust code, laid out as the kernel's is; without
# options it only looks
lint_rustfmt() {
	local files=()
	mapfile -d '' files < <(rust_files)
	try lint-rustfmt "${in_checkout[@]}" ${FMT_WRITES:+-b "$TOP"} -r "$KERNEL" "$ROOT" \
		rustfmt "${@:---check}" --edition 2021 --config-path "$KERNEL/src/.rustfmt.toml" --config skip_children=false "${files[@]}"
}

# lint_clippy_module: with the kernel's configuration; in a build directory of its own
lint_clippy_module() {
	module_source
	clippy_kbuild . module
}

# lint_clippy_vhca: the same for the tests' virtual HCA
lint_clippy_vhca() {
	module_source
	clippy_kbuild tests/vhca vhca
}

# lint_clippy_floor: the same for what stands in for the module in the benchmark
lint_clippy_floor() {
	module_source
	clippy_kbuild tests/floor floor
}

# clippy_kbuild FOLDER NAME
clippy_kbuild() {
	local command=() dir=$OUT/clippy-$2-${KERNEL##*/kernel-}
	mkdir -p "$dir"
	mapfile -d '' command < <(kbuild "$1" "$dir" modules CLIPPY=1 KRUSTFLAGS=-Dwarnings KCFLAGS=-Werror)
	try "lint-clippy-$2" "${command[@]}"
}

# lint_clippy_tests: all targets of the workspace
lint_clippy_tests() {
	local command=()
	mapfile -d '' command < <(cargo_in_root -- clippy --offline --locked --workspace --all-targets \
		--manifest-path "$TOP/tests/Cargo.toml" -- -D warnings)
	try lint-clippy-tests "${command[@]}"
}

# lint_doc_tests: the tests' library is documented without broken links
lint_doc_tests() {
	local command=()
	mapfile -d '' command < <(cargo_in_root -e RUSTDOCFLAGS=-Dwarnings -- doc --offline --locked --workspace --no-deps \
		--lib --manifest-path "$TOP/tests/Cargo.toml")
	try lint-doc-tests "${command[@]}"
}

# lint_shellcheck: all shell scripts
lint_shellcheck() {
	local files=()
	mapfile -d '' files < <(shell_files)
	try lint-shellcheck "${in_checkout[@]}" "$ROOT" shellcheck --external-sources --source-path=SCRIPTDIR "${files[@]}"
}

# lint_layers: see check-layers
lint_layers() { try lint-layers "${in_checkout[@]}" "$ROOT" "$TOP/scripts/check-layers" "$TOP" "$TOP"/tests/{vhca,floor}; }

# lint_spdx: every source file says under which licence it is
lint_spdx() {
	local files=()
	mapfile -d '' files < <(
		rust_files
		shell_files
		find "$TOP/Kbuild" "$TOP/Makefile" "$TOP/bindings" -maxdepth 1 -type f ! -name '*.list' -print0
	)
	mkdir -p "$LOGS"
	# What counts is what it prints: its status means different things in different versions.
	grep -L 'SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause' "${files[@]}" >"$LOGS/lint-spdx.log" || true
	[ ! -s "$LOGS/lint-spdx.log" ]
}

# lint_documents: they can be rendered, and the pictures are those of their sources
lint_documents() {
	local old
	documents "$OUT/doc" lint-documents || return
	old=$(old_pictures "$OUT/doc")
	[ -z "$old" ] || {
		printf 'To be drawn anew by "make doc":\n%s\n' "$old" >"$LOGS/lint-documents.log"
		return 1
	}
}

# name of the check, and the function's name behind lint_
LINTS=(
	'rustfmt:rustfmt'
	'clippy of the module, as the kernel sets it:clippy_module'
	'clippy of the virtual HCA, as the kernel sets it:clippy_vhca'
	'clippy of the module of "make bench", as the kernel sets it:clippy_floor'
	'clippy of the tests:clippy_tests'
	'rustdoc of the tests:doc_tests'
	'shellcheck:shellcheck'
	'layers (check-layers):layers'
	'SPDX headers:spdx'
	'the documents can be rendered without a warning:documents'
)

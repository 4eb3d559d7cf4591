# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
# shellcheck shell=bash disable=SC2034,SC2154 # variables of and for the others
#
# Builds the Debian package, byte for byte the same from the same commit. Sourced.

# what of the checkout building the module takes
DEB_SOURCE=(Kbuild LICENSE dkms.conf rdma chrdev bindings uapi scripts/dkms-prepare scripts/prepare-kernel)

# deb_epoch: the time of everything in the package: of the commit, or of the newest file where there is no git
deb_epoch() {
	git -c "safe.directory=$TOP" -C "$TOP" log -1 --format=%ct 2>/dev/null ||
		(cd "$TOP" && find "${DEB_SOURCE[@]}" ./*.rs packaging -printf '%T@\n') | sort -n | tail -n 1 | cut -d . -f 1
}

# deb_build DIR: builds it in this folder; sets DEB, the file, and DEB_VERSION
deb_build() {
	local dir=$1 tree source doc f
	step 'Debian package'
	DEB_VERSION=$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' "$TOP/dkms.conf")
	SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(deb_epoch)}
	DEB=$dir/umad-rs-dkms_${DEB_VERSION}_all.deb
	tree=$dir/tree
	source=$tree/usr/src/umad-rs-$DEB_VERSION
	doc=$tree/usr/share/doc/umad-rs-dkms
	rm -rf "$dir"
	mkdir -p "$source" "$doc" "$tree/etc/kernel/postrm.d" "$tree/DEBIAN"

	(cd "$TOP" && tar -c "${BUILT[@]/#/--exclude=}" "${DEB_SOURCE[@]}" ./*.rs) | tar -x -C "$source"
	# Debian wants a year there.
	sed "s/^Copyright (c) /&$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y) /" "$source/LICENSE" >"$doc/copyright"
	rm "$source/LICENSE"
	cp "$TOP/packaging/kernel-postrm" "$tree/etc/kernel/postrm.d/umad-rs-dkms"
	deb_changelog "$DEB_VERSION" | gzip -9n >"$doc/changelog.gz"
	for f in control conffiles postinst prerm postrm; do
		sed "s/@VERSION@/$DEB_VERSION/; s/@SIZE@/$(du -sk --apparent-size "$tree" | cut -f 1)/" "$TOP/packaging/$f" >"$tree/DEBIAN/$f"
	done
	chmod +x "$tree"/DEBIAN/{postinst,prerm,postrm}
	(cd "$tree" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
	# Whatever the umask of who has the checkout.
	chmod -R u=rwX,go=rX "$tree"
	find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

	run deb "${in_checkout[@]}" -e "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" "$ROOT" \
		dpkg-deb --root-owner-group --threads-max=1 --build "$tree" "$DEB"
	rm -r "$tree"
	step_end "built: $DEB"
}

# deb_changelog VERSION
deb_changelog() {
	printf 'umad-rs (%s) unstable; urgency=medium\n\n  * The module as of %s.\n\n -- %s  %s\n' "$1" \
		"$(date -u -d "@$SOURCE_DATE_EPOCH" '+%F %T UTC')" "$(sed -n 's/^Maintainer: //p' "$TOP/packaging/control")" \
		"$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
}

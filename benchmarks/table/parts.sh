#!/usr/bin/env bash
# Packs the files that DIR/state.txt lists into parts of less than 60 MB (PART_SIZE), with checksums.
#   parts.sh pack DIR PARTS     writes PARTS/state.00, PARTS/state.01, ... and PARTS/state.sha256
#   parts.sh unpack PARTS DIR   joins them into DIR, which needs its original path: checkpoints refer to files by path
set -euo pipefail

die() { echo "d1: $1" >&2; exit 2; }

[ $# -eq 3 ] || die "parts.sh takes pack DIR PARTS, or unpack PARTS DIR"
case $1 in
  pack)
    [ -f "$2/state.txt" ] || die "$2 has no state.txt; python -m benchmarks.table --out $2 writes it"
    mkdir -p "$3"
    rm -f "$3"/state.*
        # The posix format keeps fractional modification times, which show whether a weight file has changed.
    tar --format=posix -C "$2" -cf - -T "$2/state.txt" | split -b "${PART_SIZE:-55M}" -d - "$3/state."
    (cd "$3" && sha256sum state.[0-9]* > state.sha256)
    ;;
  unpack)
    [ -f "$2/state.sha256" ] || die "$2 has no state.sha256; it lists the parts, and travels with them"
    bad=$(cd "$2" && sha256sum --quiet -c state.sha256 2>/dev/null | sed 's/:.*//' | paste -sd ' ') || true
    [ -z "$bad" ] || die "$2 lacks $bad, or they are damaged; copy these parts again"
    mkdir -p "$3"
    (cd "$2" && cut -c67- state.sha256 | xargs cat) | tar -C "$3" -xf -
    ;;
  *) die "parts.sh takes pack or unpack, not $1" ;;
esac

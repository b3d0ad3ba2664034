#!/bin/sh
# Takes the page's libraries from the npm registry again, in the versions below. Needs npm; nothing else of headrace does.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
take() { # PACKAGE@VERSION FOLDER FILE...
  package=$1; folder=$2; shift 2
  rm -rf "${work:?}/package" "$folder"; mkdir -p "$folder"
  archive=$(npm pack --silent --pack-destination "$work" "$package")
  tar xzf "$work/$archive" -C "$work"
  for file in LICENSE "$@"; do cp "$work/package/$file" "$folder/"; done
}
take uplot@1.6.32 uplot dist/uPlot.iife.min.js dist/uPlot.min.css
take preact@10.29.8 preact dist/preact.module.js hooks/dist/hooks.module.js
take htm@3.1.1 htm dist/htm.module.js
# A browser resolves no bare module name without an inline import map, and source maps are not shipped.
sed -i 's#from"preact"#from"./preact.module.js"#; /sourceMappingURL/d' preact/hooks.module.js
sed -i '/sourceMappingURL/d' preact/preact.module.js
rm -rf "$work"

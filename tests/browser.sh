#!/usr/bin/env bash
# The browser that the built-in page is tested in: whatever Chromium is there, else Debian's.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "None of chromium, chromium-browser, google-chrome is on PATH: install one of them (on Debian: apt-get install chromium), then run make test again." >&2
  exit 2
fi
echo "Installing Debian's chromium for the tests of the built-in page."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null

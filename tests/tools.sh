#!/usr/bin/env bash
# Install what tests run and pip does not bring: a Chromium and Prometheus with promtool. What is on PATH stays.
set -euo pipefail
packages=() missing=()
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
  packages+=(chromium fonts-dejavu-core) missing+=("one of chromium, chromium-browser, google-chrome")
fi
if ! { command -v prometheus && command -v promtool; } >/dev/null; then
  packages+=(prometheus) missing+=("prometheus with promtool")
fi
if [ "${#packages[@]}" = 0 ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  printf 'Not on PATH: %s.\n' "${missing[@]}" >&2
  echo "Install what is missing (on Debian: apt-get install ${packages[*]}), then run make test again." >&2
  exit 2
fi
echo "Installing Debian's ${packages[*]} for the tests."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null

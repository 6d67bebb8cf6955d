#!/bin/sh
# Install Debian packages where that is possible without asking: as root, or with a passwordless sudo.
# Usage: apt_install.sh PACKAGE...
# Exit 1, with one line that says what to install by hand, where it is not.
if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo"
    else
        as_root="none"
    fi
    if [ "$as_root" != none ]; then
        export DEBIAN_FRONTEND=noninteractive
        $as_root apt-get update -qq >/dev/null 2>&1
        $as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && exit 0
    fi
fi
echo "cannot install $* here (no apt-get, or no permission): install it by hand" >&2
exit 1

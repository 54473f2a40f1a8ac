#!/bin/sh
# Installs from Debian the programs that tests drive and Python's registry does not have. As root, or with sudo where that asks
# for no password; otherwise it says what is missing and exits with 1. No service is started.
set -eu
tools="chromium prometheus systemd-analyze"
missing=""
for tool in $tools; do
    command -v "$tool" >/dev/null || missing="$missing ${tool%-analyze}" # the package is systemd
done
test -n "$missing" || exit 0

refuse() {
    echo "Tests need$missing, which $1. On Debian, as root: apt-get install --no-install-recommends$missing fonts-dejavu-core" >&2
    exit 1
}

command -v apt-get >/dev/null || refuse "only Debian's apt-get installs here"
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || refuse "only root can install"
    exec sudo -n sh "$0"
fi

echo "Installing$missing from Debian."
export DEBIAN_FRONTEND=noninteractive
# Packages ask this before they start a service.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
apt_get="apt-get -q -o DPkg::Lock::Timeout=300"
$apt_get update && $apt_get install -y --no-install-recommends $missing fonts-dejavu-core || refuse "Debian's registry did not give"

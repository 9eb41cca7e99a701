#!/bin/sh
# The README's story, typed into a terminal as it is printed there: from a daemon to a machine that runs, with a
# snapshot and a restore. Each command must have ended well, and the machine must answer at its console in the end.
#
#     story.sh DIRECTORY-OF-PROGRAMS IMAGE
#
# The image is a raw one of a guest that says `ready` at its serial port, answers there, and powers off at a q.
# `make install` is the one command that is not typed: programs that are built are installed for it, and what it writes
# and the daemon keeps is in a mount name space of its own.
set -eu
self=$(realpath "$0")
cd "$(dirname "$0")/../../.."
built=$1
image=$2

for program in tmux qemu-img qemu-system-x86_64; do
    if ! command -v $program >/dev/null; then
        echo "not run: there is no $program (make prepare)"
        exit 77
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo 'not run: only root can mount'
    exit 77
fi
if ! unshare --mount --propagation private --pid --fork --mount-proc true; then
    echo 'not run: no name spaces can be made here'
    exit 77
fi
# Mounts are gone with this script, however it ends, and so is what it has started.
if [ -z "${IN_NAMESPACE:-}" ]; then
    exec env IN_NAMESPACE=1 unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
        "$self" "$built" "$image"
fi

bed=$(dirname "$image")/story
rm -rf --one-file-system "$bed"
mkdir -p "$bed"
# Of the host's directories empty ones are seen.
for directory in /usr/local /var/lib /var/log /run /srv /etc/tapline; do
    case "$PWD/ $built/ $image" in
    *$directory/*)
        echo "not run: it would hide $directory, in which this checkout is"
        exit 77
        ;;
    esac
    if [ -d $directory ]; then mount -t tmpfs -o mode=755 tmpfs $directory; fi
done
mkdir -p /srv/vms
make --no-print-directory --silent install-files BUILT="$built" PREFIX=/usr/local
qemu-img convert -O qcow2 "$image" "$bed/debian.qcow2"

screen() { tmux -S "$bed/tmux" capture-pane -p -S - -t story; }
type_in() { tmux -S "$bed/tmux" send-keys -t story "$@"; }
fail() {
    screen
    echo "FAILED: $*"
    exit 1
}
# see TEXT: waits until it is on the screen.
see() {
    tries=0
    until screen | grep -qF "$1"; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || fail "not seen: $1"
        sleep 0.1
    done
}

tmux -S "$bed/tmux" new-session -d -s story -x 120 -y 200 -c "$bed" "env PATH=/usr/local/bin:$PATH PS1='# ' sh -i"
see '#'

# The commands of the section, without what is said about them.
sed -n '/^## The same by name/,/^`--disk data/s/^    # \(.*\)/\1/p' README.md | sed 's/  *# .*//' >"$bed/commands"
count=$(wc -l <"$bed/commands")
# With `make install` these are the eight that the story may have.
[ "$count" -ge 5 ] && [ "$count" -le 7 ] || fail "the story has $count commands"
number=0
while read -r command <&3; do
    number=$((number + 1))
    case $command in
    *--console)
        type_in "$command" Enter
        see 'ready'
        type_in hello
        see 'hello'
        type_in q
        see 'the machine has ended'
        ;;
    'taplined &')
        type_in "$command" Enter
        type_in 'until tapline host show >/dev/null 2>&1; do sleep 0.1; done; echo "ended $? with 1"' Enter
        see 'ended 0 with 1'
        ;;
    *)
        type_in "$command; echo \"ended \$? with $number\"" Enter
        see "ended 0 with $number"
        ;;
    esac
done 3<"$bed/commands"
screen
echo "typed as printed: $count commands"

#!/bin/sh
# The README's two examples, typed into a terminal as root as they are printed, one after the other: a disk without a
# daemon, then machines by name. Each command must succeed, and the machine must answer at its console in the end.
#
#     story.sh DIRECTORY-OF-PROGRAMS IMAGE
#
# The image is a raw one of a guest that prints `ready` at its serial port, answers there, and powers off at a q.
# Two things are not typed: `make install` (its files are installed from programs that are built), and systemctl, in
# whose place the daemon is started as the README says for hosts without systemd. Everything that is written is in a
# mount name space.
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

# The commands of both sections, without their comments.
sed -n '/^## A disk without a daemon/,/^## On Xen/s/^    # \(.*\)/\1/p' README.md | sed 's/  *# .*//' >"$bed/commands"
count=$(wc -l <"$bed/commands")
[ "$count" = 8 ] || fail "the README has $count commands in its two examples"
number=0
while read -r command <&3; do
    number=$((number + 1))
    case $command in
    *'vm console'*)
        type_in "$command" Enter
        type_in hello
        see 'hello'
        type_in q
        see 'the machine has ended'
        ;;
    'tapline serve '*'&')
        type_in "$command" Enter
        see 'vhost-user-blk-pci'
        ;;
    'systemctl enable --now taplined '*)
        type_in 'taplined &' Enter
        type_in "until tapline host show >/dev/null 2>&1; do sleep 0.1; done; echo \"ended \$? with $number\"" Enter
        see "ended 0 with $number"
        ;;
    *)
        type_in "$command; echo \"ended \$? with $number\"" Enter
        see "ended 0 with $number"
        ;;
    esac
done 3<"$bed/commands"
screen
echo "typed as printed: $count commands"

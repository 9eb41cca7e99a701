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

bed=$(dirname "$image")/story
rm -rf --one-file-system "$bed"
. tapline/tests/daemon/bed.sh
enter_bed "$built" "$bed" "$self" "$built" "$image"
qemu-img convert -O qcow2 "$image" "$bed/debian.qcow2"
open_terminal 120 "env PATH=$PATH PS1='# ' sh -i"
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
    'systemctl enable --now taplined')
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

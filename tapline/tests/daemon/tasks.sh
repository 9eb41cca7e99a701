#!/bin/sh
# Types the commands of one page of the manual (docs/tasks) into a terminal, and saves the output of each.
#
#     tasks.sh DIRECTORY-OF-PROGRAMS BED
#
# BED/prepare is run first, without a terminal. Then BED/steps, in order: NNN.typed is typed, its output becomes
# NNN.output and its exit status NNN.status; NNN.file is copied to the path in NNN.path. The test compares.
set -eu
self=$(realpath "$0")
built=$1
bed=$2
cd "$(dirname "$self")/../../.."
. tapline/tests/daemon/bed.sh
enter_bed "$built" "$bed" "$self" "$@"

cd "$bed"
if ! sh -eu prepare >prepare.log 2>&1; then
    cat prepare.log
    echo 'FAILED: the preparation of the page'
    exit 1
fi
# The number of a command and the exit status of the one before are in the prompt, so both are seen at its end.
open_terminal 100 "env PS1='<\\#:\$?> ' PS2='> ' TERM=screen NO_COLOR=1 PATH=$PATH bash --norc --noprofile +o history -i"
see '<1:'
number=1
for step in steps/*.typed steps/*.path; do echo "$step"; done | sort | while read -r step; do
    name=${step%.*}
    case $step in
    *'*'*) ;;
    *.path)
        mkdir -p "$(dirname "$(cat "$step")")"
        cp "$name.file" "$(cat "$step")"
        ;;
    *)
        tmux -S "$bed/tmux" load-buffer -b typed "$step"
        tmux -S "$bed/tmux" paste-buffer -b typed -t bed
        type_in Enter
        next=$((number + 1))
        see "<$next:"
        screen | sed -n "/^<$number:/,/^<$next:/p" | sed '1d;$d' >"$name.output"
        screen | sed -n "s/^<$next:\([0-9]*\)>.*/\1/p" >"$name.status"
        number=$next
        ;;
    esac
done

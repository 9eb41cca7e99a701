# One guest with a disk of each of the $backends, over equal RAM disks: the load of compare, and its figures for the host.
set -- $backends
ram_disks $# 20
number=0
disks=
for each in "$@"; do
    # A page that was never written is not there, and is read for nothing.
    dd if=/dev/zero of=/dev/ram$number bs=1M count=20 2>/dev/null
    disks="$disks $each:/dev/ram$number"
    number=$((number + 1))
done
# Words of a list.
# shellcheck disable=SC2086
guest a compare "backends='$backends' cases='$cases' rounds=$rounds requests=$requests" $disks
# For who counts instructions: where code lies.
cat /proc/[0-9]*/maps 2>/dev/null | grep /drop/tapline >/out/maps
cp /proc/kallsyms /proc/xen/xensyms /out/
# Looking costs instructions too: a program that is started costs a tenth of a run. So the shell itself looks and waits.
exec 8<"$(console_of a)"
mkfifo /tmp/never
exec 9<>/tmp/never
said=
# until_said WORDS SECONDS
until_said() {
    left=$2
    while :; do
        while IFS= read -r line <&8; do
            case $said$line in
            *"TAPLINE $1" | *"TAPLINE $1"[!0-9]*) said= && return ;;
            *"TAPLINE fail="*) fail "the guest fails: $line" ;;
            esac
            said=
        done
        said=$said$line
        [ "$left" -gt 0 ] || fail "the guest does not say $1"
        left=$((left - 1))
        # It waits in vain, for a second. The shell of dom0 is bash.
        # shellcheck disable=SC3045
        read -r -t 1 _ <&9
    done
}
n=1
while [ $n -le "$rounds" ]; do
    until_said "round=$n" 1000
    echo "TAPLINE round=$n"
    n=$((n + 1))
done
until_said end=ok 60
tr '\r' '\n' <"$(console_of a)" | grep -a '^TAPLINE figure='

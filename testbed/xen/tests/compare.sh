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
guest a compare "backends='$backends' rounds=$rounds requests=$requests" $disks
# For who counts instructions: where code lies.
cat /proc/[0-9]*/maps 2>/dev/null | grep /drop/tapline >/out/maps
cp /proc/kallsyms /proc/xen/xensyms /out/
# Who looks again and again takes instructions from what is measured; this sleeps until the guest says something.
mkfifo /tmp/said
tail -n +1 -f "$(console_of a)" >/tmp/said &
tail=$!
ended=no
while read -r said; do
    case $said in
    "TAPLINE round="* | "TAPLINE figure="*) echo "$said" ;;
    "TAPLINE end=ok"*) ended=yes && break ;;
    "TAPLINE fail="*) break ;;
    esac
done </tmp/said
kill $tail
[ $ended = yes ] || fail "the guest: $(tail -n 20 "$(console_of a)")"

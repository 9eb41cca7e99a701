# A guest to which disks are plugged and from which they are unplugged: says which it has whenever that has changed, as
# BRIDGE.SLOT=SERIAL, and powers off when the power button is pressed.
for event in /dev/input/event*; do
    (dd if="$event" of=/tmp/pressed bs=24 count=1 2>/dev/null && mv /tmp/pressed /tmp/button) &
done

# disk_of /sys/block/vdX: where it is on the buses, and its serial number, or the label of its FAT file system.
disk_of() {
    device=$(readlink -f "$1")
    slots=${device#/sys/devices/pci0000:00/0000:00:}
    behind=${slots#*/0000:??:}
    # It has no end of a line, which read calls a failure.
    serial=
    read -r serial <"$1/serial" || :
    [ -n "$serial" ] || read -r serial <<LABEL
$(dd if="/dev/${1##*/}" bs=1 skip=43 count=11 2>/dev/null)
LABEL
    echo "${slots%%.*}.${behind%%.*}=$serial"
}

last=none
while [ ! -e /tmp/button ]; do
    now=$(ls /sys/block)
    if [ "$now" != "$last" ]; then
        last=$now
        list=
        for disk in /sys/block/vd*; do [ ! -e "$disk/serial" ] || list="$list $(disk_of "$disk")"; done
        say "disks=$(echo "$list" | wc -w):$list"
    fi
    usleep 200000
done
say pressed=1

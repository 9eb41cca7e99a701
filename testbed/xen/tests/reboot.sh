# A guest with disks that xl's configuration names by the block script reboots, which gives it other processes and the same
# disks, and is destroyed by xl while it writes.
. /drop/life.sh
ram_disks 1 12
xl_names_disks
fill /dev/ram0 4
before=$(hash_of /dev/ram0)
disks="'$(named /dev/ram0 xvda w)'"
on_reboot=restart
guest a rebooted ""
wait_said a "before=$before" 200
wait_said a written=yes 60
first=$(server_of a xvda)
id=$(xl domid a)
after=$(said a after)
answer a reboot
wait_said a "before=$after" 300
second=$(server_of a xvda)
[ "$first" != "$second" ] && [ "$id" != "$(xl domid a)" ] || fail "it did not reboot"
[ ! -d "/proc/$first" ] || fail "the first boot's process is left"
no_disk "$id" xvda
wait_said a written=yes 60
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
no_xl_nodes
content=$(hash_of /dev/ram0)
sleep 2
expect "the disk after the guest's end" "$(hash_of /dev/ram0)" "$content"

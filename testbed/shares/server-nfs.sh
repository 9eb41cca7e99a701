# The server of NFS: the kernel's, by Debian's nfs-kernel-server.

KIND=nfs4
files=$srv/nfs

# share HOST: the words for where the host finds the share.
share() { echo "--nfs $(address "$1"):$files --nfs-version 4.2"; }
wrong_share() { echo "--nfs $(address "$1"):$srv/nothing"; }
# Nobody is root on that one, as exports are unless it is said otherwise.
squashed_share() { echo "--nfs $(address "$1"):$srv/squash"; }
nobodys_share() { echo "--nfs $1:$files"; }
WRONG="no such file|denied"
AWAY="not done in|timed out|no route|refused|timeout"

# What mountinfo must say: of the mount, and of its file system.
OPTIONS_MOUNT="nosuid nodev noexec noatime"
OPTIONS_KIND="hard proto=tcp timeo=600 retrans=2 vers=4.2"

prepare_server() {
    mkdir -p $files $srv/squash $srv/only-read /run/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/nfsdcld /var/lib/nfs/nfsdcltrack /proc/fs/nfsd
    touch /var/lib/nfs/etab /var/lib/nfs/rmtab
    mount -t rpc_pipefs rpc /run/rpc_pipefs || fail "mount rpc_pipefs"
    mount -t nfsd nfsd /proc/fs/nfsd || fail "mount nfsd"
    cat >/etc/exports <<EXPORTS
$files 10.0.0.0/8(rw,sync,no_root_squash,no_subtree_check)
$srv/squash 10.0.0.0/8(rw,sync,no_subtree_check)
$srv/only-read 10.0.0.0/8(ro,sync,no_root_squash,no_subtree_check)
EXPORTS
    rpc.mountd -F -N 3 >/tmp/mountd.log 2>&1 &
    nfsdcld -F -p /run/rpc_pipefs >/tmp/nfsdcld.log 2>&1 &
    # Seconds after which a client that is silent has lost its locks, and for which a new server waits for the clients of the old.
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    exportfs -ra || fail exportfs
    within 30 "nfsdcld waits for the kernel" awaits_kernel $!
    server_goes_on
    # The kernel waits for it for a second and then turns to another; with two of them no client could claim its locks again.
    within 60 "nfsdcld keeps the clients" keeps_clients
}

awaits_kernel() { ls -l "/proc/$1/fd" | grep -q inotify; }
keeps_clients() {
    dmesg | grep 'client tracking operations' | tail -n 1 | grep -q nfsdcld && return
    server_stops
    server_goes_on
    return 1
}

server_goes_on() { rpc.nfsd -N 3 -V 4.2 8 || fail rpc.nfsd; }
server_stops() { rpc.nfsd 0 || fail "rpc.nfsd 0"; }

server_words() {
    echo "--- server"
    cat /tmp/mountd.log /tmp/nfsdcld.log
    cat /proc/fs/nfsd/clients/*/info 2>/dev/null
    cat /proc/locks
}

# The server of SMB: Samba's smbd.

KIND=cifs
files=$srv/smb

share() { echo "--smb //$(address "$1")/vms --credentials /tmp/credentials"; }
wrong_share() { echo "--smb //$(address "$1")/nothing --credentials /tmp/credentials"; }
nobodys_share() { echo "--smb //$1/vms --credentials /tmp/credentials"; }
wrong_password() { echo "--smb //$(address "$1")/vms --credentials /tmp/wrong"; }
WRONG="no such file|mount error"
AWAY="not done in|could not connect|timed out|host is down|no route|mount error|timeout"

OPTIONS_MOUNT="nosuid nodev noexec"
OPTIONS_KIND="hard cache=none uid=0 gid=0 file_mode=0600 dir_mode=0700"

prepare_server() {
    mkdir -p $files /run/samba /var/lib/samba/private /var/cache/samba /var/log/samba
    chown 1000:1000 $files
    cat >/etc/samba/smb.conf <<CONF
[global]
server role = standalone server
smb ports = 445
disable spoolss = yes
load printers = no
log file = /tmp/smbd.log
[vms]
path = $files
read only = no
CONF
    echo "tapline:x:1000:1000::/:/bin/sh" >>/etc/passwd
    echo "tapline:x:1000:" >>/etc/group
    printf 'secret\nsecret\n' | smbpasswd -s -a tapline >/tmp/smbpasswd 2>&1 || { cat /tmp/smbpasswd; fail smbpasswd; }
    (
        umask 077
        printf 'username=tapline\npassword=secret\n' >/tmp/credentials
        printf 'username=tapline\npassword=guess\n' >/tmp/wrong
    )
    server_goes_on
}

server_goes_on() {
    smbd -D || fail smbd
    within 30 "smbd listens" listens
}
listens() { ss -Hltn 'sport = 445' | grep -q 445; }
server_stops() {
    pkill -KILL smbd
    within 10 "smbd ends" ended
}
ended() { ! pgrep smbd >/dev/null; }

server_words() {
    echo "--- server"
    tail -n 20 /tmp/smbd.log
    smbstatus -L 2>&1 | tail -n 20
}

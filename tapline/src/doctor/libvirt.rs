//! Checks what may keep libvirt's machines from opening disks: socket permissions, AppArmor, SELinux, and the hook.
//!
//! It reads libvirt's settings and the permissions of sockets, and calls neither libvirt nor the daemon. Invariant: a
//! host without libvirt gets no line.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{Check, Host, bad, good, unknown};

/// libvirt's settings of its QEMU driver.
const QEMU_CONF: &str = "etc/libvirt/qemu.conf";

/// The users that QEMU runs as by default: Debian's and Ubuntu's, then Fedora's and others'.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The AppArmor abstraction that each domain's profile includes, and the file with our rules that it must include.
const ABSTRACTION: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
const RULES: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/tapline";

/// The administrator's additions to the abstraction. Debian 12 includes this file, not the directory.
const ADDITIONS: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";

const HOOK: &str = "etc/libvirt/hooks/qemu.d/tapline";

/// The user of QEMU's processes and all its groups.
struct QemuUser {
    name: String,
    uid: u32,
    groups: BTreeSet<u32>,
}

impl Host {
    /// All checks for libvirt's machines; none where libvirt's QEMU driver is not installed.
    pub(super) fn libvirt(&self) -> Vec<Check> {
        let Some(settings) = self.read(QEMU_CONF).or_else(|| self.has_qemu_driver().then(String::new)) else {
            return Vec::new();
        };
        let mut checks = vec![self.sockets(&settings)];
        let confined = setting(&settings, "security_driver").is_none_or(|driver| !driver.contains("none"));
        if confined {
            checks.extend(self.apparmor());
            checks.extend(self.selinux());
        }
        checks.push(self.hook());
        checks
    }

    fn has_qemu_driver(&self) -> bool {
        // qemu.conf may be readable by root only.
        [QEMU_CONF, "usr/sbin/virtqemud", "usr/sbin/libvirtd"].iter().any(|path| self.root.join(path).exists())
    }

    /// Checks whether QEMU's user may open the sockets of plugged disks.
    fn sockets(&self, settings: &str) -> Check {
        let Some(user) = self.qemu_user(settings) else {
            return unknown("libvirt: user that QEMU runs as is not known: see 'user' in /etc/libvirt/qemu.conf");
        };
        if user.uid == 0 {
            return good("libvirt: QEMU runs as root and may open all disks");
        }
        let sockets = match self.disk_sockets() {
            Ok(sockets) => sockets,
            Err(error) => {
                return unknown(format!("libvirt: permissions of disks' sockets in {}: {error}", self.run.display()));
            }
        };
        let closed = sockets.iter().find(|socket| !user.may_open(&self.root, socket));
        match (closed, sockets.len()) {
            (Some(socket), _) => bad(
                format!(
                    "libvirt: QEMU's user {} may not open {}: 'virsh start' would wait forever",
                    user.name,
                    self.shown(socket)
                ),
                format!(
                    "set socket-group = \"{}\" in section [plug] of /etc/tapline/taplined.toml; systemctl restart \
                     taplined; plug the disk again",
                    self.group_name(&user).unwrap_or_else(|| user.name.clone())
                ),
            ),
            (None, 0) => good("libvirt: no disk is plugged whose socket it could open"),
            (None, count) => good(format!("libvirt: QEMU's user {} may open the sockets of {count} disks", user.name)),
        }
    }

    fn shown(&self, path: &Path) -> String {
        format!("/{}", path.strip_prefix(&self.root).unwrap_or(path).display())
    }

    /// The sockets of plugged disks for machines that are managed elsewhere. Sockets for VMs of the daemon belong to
    /// the VMs' own users.
    fn disk_sockets(&self) -> std::io::Result<Vec<PathBuf>> {
        let places = match fs::read_dir(self.directories_of_disks()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            places => places?,
        };
        let mut sockets = Vec::new();
        for place in places {
            let place = place?.path();
            for path in ["vhost.sock", "nbd.sock"].map(|name| place.join(name)) {
                match fs::metadata(&path) {
                    Ok(file) if file.uid() == 0 => sockets.push(path),
                    Ok(_) => {}
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        }
        sockets.sort();
        Ok(sockets)
    }

    fn directories_of_disks(&self) -> PathBuf {
        self.root.join(self.run.strip_prefix("/").unwrap_or(&self.run)).join("vbd")
    }

    fn qemu_user(&self, settings: &str) -> Option<QemuUser> {
        let passwd = self.read("etc/passwd")?;
        let group = self.read("etc/group").unwrap_or_default();
        let entry = |name: &str| {
            // With a plus sign it is a number, not a name.
            let wanted = name.trim_start_matches('+');
            passwd.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(':').collect();
                let &[found, _, uid, gid, ..] = fields.as_slice() else { return None };
                (found == name || uid == wanted)
                    .then(|| Some((found.to_owned(), uid.parse().ok()?, gid.parse().ok()?)))?
            })
        };
        let (name, uid, gid) = match setting(settings, "user") {
            Some(name) => entry(&name)?,
            None => QEMU_USERS.iter().find_map(|name| entry(name))?,
        };
        let own = setting(settings, "group").and_then(|name| group_of(&group, name.trim_start_matches('+')));
        let mut groups: BTreeSet<u32> = [own.unwrap_or(gid)].into();
        groups.extend(group.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let &[_, _, gid, members] = fields.as_slice() else { return None };
            members.split(',').any(|member| member == name).then(|| gid.parse::<u32>().ok())?
        }));
        Some(QemuUser { name, uid, groups })
    }

    /// The name of a group of QEMU's user: its group of the same name, or any other.
    fn group_name(&self, user: &QemuUser) -> Option<String> {
        let text = self.read("etc/group")?;
        if group_of(&text, &user.name).is_some_and(|gid| user.groups.contains(&gid)) {
            return Some(user.name.clone());
        }
        text.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid: u32 = fields.nth(1)?.parse().ok()?;
            user.groups.contains(&gid).then(|| name.to_owned())
        })
    }

    fn apparmor(&self) -> Option<Check> {
        let is_active = self.read("sys/module/apparmor/parameters/enabled").is_some_and(|enabled| enabled == "Y");
        let abstraction = self.read(ABSTRACTION).filter(|_| is_active)?;
        let additions = self.read(ADDITIONS).unwrap_or_default();
        let includes = |text: &str| {
            let mut lines = text.lines().map(str::trim).filter(|line| line.starts_with("include"));
            lines.any(|line| line.contains("abstractions/libvirt-qemu.d"))
        };
        Some(if self.read(RULES).is_none() {
            bad(
                "libvirt: AppArmor does not let QEMU open the sockets of disks",
                format!("install -D -m 644 {}/apparmor /{RULES}", installed()),
            )
        } else if includes(&abstraction) || includes(&additions) {
            good("libvirt: AppArmor lets QEMU open the sockets of disks")
        } else {
            bad(
                format!("libvirt: AppArmor ignores /{RULES}, which lets QEMU open the sockets of disks"),
                format!("echo 'include if exists <abstractions/libvirt-qemu.d>' >> /{ADDITIONS}"),
            )
        })
    }

    fn selinux(&self) -> Option<Check> {
        if self.read("sys/fs/selinux/enforce")? != "1" {
            return None;
        }
        let stores = match fs::read_dir(self.root.join("var/lib/selinux")) {
            Ok(stores) => stores.flatten().map(|store| store.path().join("active/modules")),
            Err(_) => return Some(unknown("libvirt: SELinux modules: only root may list them")),
        };
        let mut priorities = stores.filter_map(|modules| fs::read_dir(modules).ok()).flat_map(Iterator::flatten);
        Some(match priorities.any(|priority| priority.path().join("tapline").exists()) {
            true => good("libvirt: SELinux lets QEMU open the sockets of disks"),
            false => bad(
                "libvirt: SELinux does not let QEMU open the sockets of disks",
                format!("semodule -i {}/tapline.cil && restorecon -R /run/tapline", installed()),
            ),
        })
    }

    fn hook(&self) -> Check {
        let is_executable = fs::metadata(self.root.join(HOOK))
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
        match is_executable {
            true => good("libvirt: disks are plugged when a domain starts and unplugged when it stops (hook)"),
            false => good("libvirt: disks are plugged with 'tapline vbd plug'; a hook can do it (docs/libvirt.md)"),
        }
    }
}

impl QemuUser {
    /// Whether the user may connect to a socket: write to it, and search the directories from `root` to it.
    fn may_open(&self, root: &Path, socket: &Path) -> bool {
        let directories = socket.ancestors().skip(1).take_while(|directory| directory.starts_with(root));
        let mut directories = directories.filter(|directory| *directory != root);
        self.may(socket, 0o2) && directories.all(|directory| self.may(directory, 0o1))
    }

    /// Whether a file's mode gives the user this right: 2 to write, 1 to search.
    fn may(&self, path: &Path, right: u32) -> bool {
        let Ok(file) = fs::metadata(path) else { return false };
        let shift = match (file.uid() == self.uid, self.groups.contains(&file.gid())) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        file.mode() >> shift & right != 0
    }
}

/// The directory of this installation with the files for libvirt.
fn installed() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let prefix = program.parent().and_then(Path::parent).unwrap_or(Path::new("/usr/local"));
    prefix.join("share/tapline/libvirt").display().to_string()
}

/// The value of a libvirt setting `name = "value"`; a list is returned as text.
fn setting(text: &str, name: &str) -> Option<String> {
    let mut values = text.lines().filter_map(|line| {
        let (found, value) = line.split_once('=')?;
        (found.trim() == name).then(|| value.trim().trim_matches('"').to_owned())
    });
    values.next_back()
}

fn group_of(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next()?;
        let gid: u32 = fields.nth(1)?.parse().ok()?;
        (found == name || gid.to_string() == name).then_some(gid)
    })
}

#[cfg(test)]
mod test {
    use super::super::CheckState;
    use super::super::test::host;
    use super::*;

    const PASSWD: &str = "root:x:0:0::/:/bin/sh\nlibvirt-qemu:x:64055:107::/:/bin/false\n";
    const GROUP: &str = "root:x:0:\nkvm:x:107:\nlibvirt-qemu:x:64055:libvirt-qemu\n";
    const INCLUDE: &str = "  include if exists <abstractions/libvirt-qemu.d>\n";

    fn states(host: &Host) -> Vec<CheckState> {
        host.libvirt().iter().map(|check| check.state).collect()
    }

    #[test]
    fn a_host_without_libvirt_gets_no_line() {
        let (_room, host) = host(&[("etc/passwd", PASSWD)]);
        assert_eq!(states(&host), []);
    }

    #[test]
    fn qemus_user_has_the_groups_of_the_settings() {
        let (_room, host) = host(&[("etc/passwd", PASSWD), ("etc/group", GROUP)]);
        let user = host.qemu_user("#user = \"root\"\n").unwrap();
        assert_eq!((user.name.as_str(), user.uid, user.groups), ("libvirt-qemu", 64_055, [107, 64_055].into()));
        assert_eq!(host.qemu_user("user = \"root\"\n").unwrap().uid, 0);
        assert_eq!(host.qemu_user("user = \"+64055\"\ngroup = \"+0\"\n").unwrap().groups, [0, 64_055].into());
        assert!(host.qemu_user("user = \"gone\"\n").is_none());
    }

    /// Needs root, because only root may give a socket to another user.
    #[test]
    fn a_socket_is_closed_unless_all_modes_allow_it() {
        let socket = "run/tapline/vbd/1/vhost.sock";
        let (room, host) = host(&[("etc/passwd", PASSWD), ("etc/group", GROUP), (QEMU_CONF, ""), (socket, "")]);
        let mode = |path: &str, mode| {
            fs::set_permissions(room.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        if !rustix::process::geteuid().is_root() {
            return assert_eq!(host.disk_sockets().unwrap(), Vec::<PathBuf>::new());
        }
        mode(socket, 0o600);
        let check = &host.libvirt()[0];
        assert!(check.state == CheckState::Bad && check.text.contains("may not open /run/tapline/vbd/1/vhost.sock"));
        assert!(check.mend.as_ref().unwrap().contains("socket-group = \"libvirt-qemu\""), "{check:?}");
        mode(socket, 0o660);
        let group = Some(64_055);
        std::os::unix::fs::chown(room.path().join(socket), None, group).unwrap();
        assert_eq!(states(&host)[0], CheckState::Good);
        mode("run/tapline/vbd/1", 0o700);
        assert_eq!(states(&host)[0], CheckState::Bad);
    }

    #[test]
    fn rules_that_apparmor_does_not_include_are_bad() {
        let active = [("sys/module/apparmor/parameters/enabled", "Y\n"), (QEMU_CONF, "")];
        let check = |files: &[(&'static str, &str)]| {
            let (_room, host) = host(&[active.as_slice(), files].concat());
            host.apparmor().map(|check| check.state)
        };
        assert_eq!(check(&[]), None);
        assert_eq!(check(&[(ABSTRACTION, INCLUDE)]), Some(CheckState::Bad));
        assert_eq!(check(&[(ABSTRACTION, ""), (RULES, "rules")]), Some(CheckState::Bad));
        assert_eq!(
            check(&[(ABSTRACTION, ""), (RULES, "rules"), (ADDITIONS, "# include <abstractions/libvirt-qemu.d>")]),
            Some(CheckState::Bad)
        );
        assert_eq!(check(&[(ABSTRACTION, ""), (RULES, "rules"), (ADDITIONS, INCLUDE)]), Some(CheckState::Good));
        assert_eq!(check(&[(ABSTRACTION, INCLUDE), (RULES, "rules")]), Some(CheckState::Good));
    }

    #[test]
    fn an_enforcing_selinux_needs_the_module() {
        let check = |files: &[(&str, &str)]| {
            let (_room, host) = host(files);
            host.selinux().map(|check| check.state)
        };
        let module = "var/lib/selinux/targeted/active/modules/400/tapline/cil";
        assert_eq!(check(&[("sys/fs/selinux/enforce", "0")]), None);
        assert_eq!(check(&[("sys/fs/selinux/enforce", "1")]), Some(CheckState::Unknown));
        assert_eq!(
            check(&[("sys/fs/selinux/enforce", "1"), ("var/lib/selinux/targeted/active/modules/100/base/cil", "")]),
            Some(CheckState::Bad)
        );
        assert_eq!(check(&[("sys/fs/selinux/enforce", "1"), (module, "")]), Some(CheckState::Good));
    }
}

//! Parses a libvirt domain's XML for its Tapline disks.
//!
//! A disk is ours if its socket is in the daemon's run directory; the path contains the VBD's UUID. Names and targets
//! are not used, because users can change them in libvirt. Invariant: each VBD is listed once.

use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};
use uuid::Uuid;

/// File names of sockets that guests connect to.
const SOCKETS: [&str; 2] = ["vhost.sock", "nbd.sock"];

/// A libvirt domain and its Tapline disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its UUID, which does not change when it is renamed.
    pub uuid: Uuid,
    /// Its name, for messages.
    pub name: String,
    /// Its disks that are VBDs.
    pub disks: Vec<DomainDisk>,
}

/// A disk of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainDisk {
    /// The VBD.
    pub vbd: Uuid,
    /// The socket that QEMU connects to.
    pub socket: PathBuf,
}

impl Domain {
    /// Parses a domain's XML. Disks whose sockets are not below `run_directory` are ignored: they belong to other
    /// programs.
    pub fn parse(xml: &str, run_directory: &Path) -> Result<Domain, String> {
        let document = Document::parse(xml).map_err(|error| error.to_string())?;
        let root = document.root_element();
        if !root.has_tag_name("domain") {
            return Err(format!("its first element is {}, not domain", root.tag_name().name()));
        }
        let text = |tag: &str| child(root, tag).and_then(|node| node.text()).map(str::trim);
        let uuid = text("uuid").and_then(|uuid| uuid.parse().ok()).ok_or("it has no valid uuid")?;
        let name = text("name").unwrap_or_default().to_owned();
        let sockets = child(root, "devices").into_iter().flat_map(|devices| devices.children()).filter_map(socket_of);
        let mut disks: Vec<DomainDisk> = Vec::new();
        for socket in sockets {
            let Some(vbd) = vbd_of(&socket, run_directory) else { continue };
            if disks.iter().any(|disk| disk.vbd == vbd) {
                return Err(format!("VBD {vbd} is the source of two of its disks; remove one of them"));
            }
            disks.push(DomainDisk { vbd, socket });
        }
        Ok(Domain { uuid, name, disks })
    }
}

fn child<'a>(node: Node<'a, 'a>, tag: &str) -> Option<Node<'a, 'a>> {
    node.children().find(|child| child.has_tag_name(tag))
}

/// The socket that a device connects to, if it is a vhost-user disk or an NBD disk at a Unix socket.
fn socket_of(device: Node<'_, '_>) -> Option<PathBuf> {
    if !device.has_tag_name("disk") {
        return None;
    }
    let source = child(device, "source")?;
    match device.attribute("type")? {
        "vhostuser" if source.attribute("type") == Some("unix") => source.attribute("path").map(PathBuf::from),
        "network" if source.attribute("protocol") == Some("nbd") => {
            let host = child(source, "host")?;
            (host.attribute("transport") == Some("unix")).then(|| host.attribute("socket").map(PathBuf::from))?
        }
        _ => None,
    }
}

/// The VBD of a socket `RUN-DIRECTORY/vbd/UUID/vhost.sock`.
fn vbd_of(socket: &Path, run_directory: &Path) -> Option<Uuid> {
    let below = canonical(socket).strip_prefix(canonical(run_directory).join("vbd")).ok()?.to_owned();
    let mut parts = below.iter().map(|part| part.to_str());
    let (Some(Some(uuid)), Some(Some(name)), None) = (parts.next(), parts.next(), parts.next()) else { return None };
    SOCKETS.contains(&name).then(|| uuid.parse().ok())?
}

/// Replaces /var/run, a link to /run, at the beginning of a path.
pub fn canonical(path: &Path) -> PathBuf {
    path.strip_prefix("/var/run").map_or_else(|_| path.to_owned(), |rest| Path::new("/run").join(rest))
}

#[cfg(test)]
mod test {
    use super::*;

    const DOMAIN: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa0";
    const FIRST: &str = "0196a5de-0000-7000-8000-000000000001";
    const SECOND: &str = "0196a5de-0000-7000-8000-000000000002";

    fn parse(devices: &str) -> Result<Domain, String> {
        let xml = format!(
            "<domain type='kvm' id='3' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>web &amp; \
             db</name><uuid>{DOMAIN}</uuid><devices>{devices}</devices></domain>"
        );
        Domain::parse(&xml, Path::new("/run/tapline"))
    }

    fn vhost_user(path: &str) -> String {
        format!("<disk type='vhostuser' device='disk'><source type='unix' path='{path}'/></disk>")
    }

    #[test]
    fn disks_are_found_by_the_paths_of_their_sockets() {
        let first = format!("/run/tapline/vbd/{FIRST}/vhost.sock");
        let second = format!("/var/run/tapline/vbd/{SECOND}/nbd.sock");
        let nbd = format!(
            "<disk type='network' device='disk'><source protocol='nbd'><host transport='unix' \
             socket='{second}'/></source></disk>"
        );
        let domain = parse(&(vhost_user(&first) + &nbd)).unwrap();
        assert_eq!((domain.uuid.to_string().as_str(), domain.name.as_str()), (DOMAIN, "web & db"));
        let found: Vec<_> = domain.disks.iter().map(|disk| (disk.vbd.to_string(), disk.socket.clone())).collect();
        assert_eq!(found, [(FIRST.to_owned(), first.into()), (SECOND.to_owned(), second.into())]);
    }

    #[test]
    fn disks_of_other_programs_are_ignored() {
        let elsewhere = [
            vhost_user("/run/spdk/vhost.0"),
            vhost_user("/run/tapline/vbd/web/vhost.sock"),
            vhost_user(&format!("/run/tapline/vbd/{FIRST}/control.sock")),
            vhost_user(&format!("/run/tapline/vbd/{FIRST}/more/vhost.sock")),
            vhost_user(&format!("/srv/run/tapline/vbd/{FIRST}/vhost.sock")),
            "<disk type='file' device='cdrom'/><disk type='file'><source file='/a.qcow2'/></disk>".to_owned(),
            format!(
                "<interface type='vhostuser'><source type='unix' \
                 path='/run/tapline/vbd/{FIRST}/vhost.sock'/></interface>"
            ),
        ];
        assert_eq!(parse(&elsewhere.concat()).unwrap().disks, []);
    }

    #[test]
    fn a_vbd_that_is_the_source_of_two_disks_is_refused() {
        let disk = vhost_user(&format!("/run/tapline/vbd/{FIRST}/vhost.sock"));
        assert!(parse(&format!("{disk}{disk}")).unwrap_err().contains("two of its disks"));
    }

    #[test]
    fn xml_that_is_cut_off_or_of_something_else_is_refused() {
        let run = Path::new("/run/tapline");
        for xml in ["", "<domain><uuid>", "<network><name>a</name></network>", "<domain><name>a</name></domain>"] {
            assert!(Domain::parse(xml, run).is_err(), "{xml}");
        }
    }
}

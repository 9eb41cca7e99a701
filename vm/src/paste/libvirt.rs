//! Elements of libvirt's domain XML: for a domain's definition, or a device alone for `virsh attach-device`.
//!
//! It only generates text. Invariants: comments contain no two hyphens in a row, which XML forbids; the target is one
//! that domains hardly have, since libvirt refuses a definition in which two disks have the same.

use std::path::Path;

use super::{Properties, Served};
use crate::syntax::xml_value;

/// The disk's element, with the memory that it needs and where they belong.
pub fn definition(served: Served<'_>, disk: Properties) -> String {
    let device = element(served, disk);
    match served {
        Served::VhostUser(..) => format!(
            "<!-- in <domain>, once: the guest's memory is shared with the disk's process -->\n\
             <memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
             <!-- in <devices>; {NOTES} -->\n{device}"
        ),
        Served::NbdUnix(_) => format!("<!-- in <devices>; {NOTES} -->\n{device}"),
        Served::NbdTcp(..) => format!("<!-- in <devices> -->\n{device}"),
    }
}

/// The disk's element alone, as a file for `virsh attach-device`.
pub fn device(served: Served<'_>, disk: Properties) -> String {
    let needed = match served {
        Served::VhostUser(..) => {
            "<!-- for virsh attach-device; the domain must have been started with shared memory: memoryBacking with \
             source memfd and access shared -->\n"
        }
        Served::NbdUnix(_) | Served::NbdTcp(..) => "<!-- for virsh attach-device -->\n",
    };
    format!("{needed}{}", element(served, disk))
}

/// Notes for the user of the XML.
const NOTES: &str = "virsh start waits forever if QEMU's user may not open the socket: check with 'tapline doctor'. \
                     The target is only a name, which must be free in the domain";

fn element(served: Served<'_>, disk: Properties) -> String {
    match served {
        Served::VhostUser(socket, queues) => vhost_user(socket, queues),
        Served::NbdUnix(socket) => {
            let path = socket.display().to_string();
            let host = format!("<host transport='unix' socket='{}'/>", xml_value(&path));
            nbd(&host, &target(&path), disk)
        }
        Served::NbdTcp(host, port) => {
            let target = target(&format!("{host}:{port}"));
            nbd(&format!("<host name='{}' port='{port}'/>", xml_value(host)), &target, disk)
        }
    }
}

/// A read-only disk tells the guest so itself. libvirt uses seconds, and finds the option that its QEMU supports.
fn vhost_user(socket: &Path, queues: u16) -> String {
    let path = socket.display().to_string();
    format!(
        "<disk type='vhostuser' device='disk'>\n  \
         <driver name='qemu' type='raw' queues='{queues}'/>\n  \
         <source type='unix' path='{}'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n  \
         <target dev='{}' bus='virtio'/>\n\
         </disk>\n",
        xml_value(&path),
        target(&path)
    )
}

fn nbd(host: &str, target: &str, disk: Properties) -> String {
    let block = match disk.block {
        512 => String::new(),
        block => format!("  <blockio logical_block_size='{block}' physical_block_size='{block}'/>\n"),
    };
    let read_only = if disk.read_only { "  <readonly/>\n" } else { "" };
    format!(
        "<disk type='network' device='disk'>\n  \
         <driver name='qemu' type='raw' discard='unmap'/>\n  \
         <source protocol='nbd'>\n    {host}\n  </source>\n  \
         <target dev='{target}' bus='virtio'/>\n\
         {block}{read_only}</disk>\n"
    )
}

/// The name of a virtio disk, from `vdaa` to `vdzz`, chosen by where the disk is served: the same each time, and for
/// two disks of a domain rarely equal. Guests number disks by their PCI addresses and do not see it.
fn target(served_at: &str) -> String {
    let hash = served_at.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    let letter = |number: u32| char::from_u32(u32::from(b'a') + number % 26).unwrap_or('a');
    format!("vd{}{}", letter(hash / 26), letter(hash))
}

#[cfg(test)]
mod test {
    use super::*;

    const SEEN: Properties = Properties { read_only: false, block: 512 };

    fn socket(number: u32) -> String {
        format!("/run/tapline/vbd/0196a5de-0000-7000-8000-{number:012}/vhost.sock")
    }

    #[test]
    fn targets_are_names_that_first_disks_do_not_have() {
        let targets: Vec<String> = (0..100).map(|number| target(&socket(number))).collect();
        assert!(targets.iter().all(|target| target.len() == 4 && target.starts_with("vd")), "{targets:?}");
        assert_eq!(targets[7], target(&socket(7)));
        assert!(targets.windows(2).all(|pair| pair[0] != pair[1]), "{targets:?}");
    }

    #[test]
    fn comments_have_no_two_hyphens_in_a_row() {
        let path = socket(1);
        for served in [Served::VhostUser(Path::new(&path), 2), Served::NbdUnix(Path::new(&path))] {
            for text in [definition(served, SEEN), device(served, SEEN)] {
                let comments: Vec<&str> =
                    text.split("<!--").skip(1).map(|rest| rest.split("-->").next().unwrap()).collect();
                assert!(!comments.is_empty() && comments.iter().all(|comment| !comment.contains("--")), "{text}");
            }
        }
    }

    #[test]
    fn a_device_alone_has_one_element() {
        let path = socket(1);
        let text = device(Served::VhostUser(Path::new(&path), 2), SEEN);
        assert!(text.contains("<disk type='vhostuser'") && !text.contains("<memoryBacking>"), "{text}");
    }
}

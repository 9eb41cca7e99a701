//! The configuration to paste for a virtual machine that is managed elsewhere, to connect it to one of our disks.
//!
//! It only generates text; nothing need be served yet. What a monitor does not support is an error that names the
//! alternative, never text that does not work.

mod libvirt;

use std::path::Path;

use thiserror::Error;

use crate::qemu::version::Reconnect;
use crate::syntax::{cloud_hypervisor_value, qemu_value, shell_word, xl_value};

/// The program that reads the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Monitor {
    /// Arguments of QEMU before 10.2.
    Qemu,
    /// Arguments of QEMU 9.2 and later.
    Qemu92,
    /// Elements of libvirt's domain XML.
    Libvirt,
    /// The disk's element of it alone, for `virsh attach-device`.
    LibvirtDevice,
    /// Arguments of Cloud Hypervisor.
    CloudHypervisor,
}

/// Where a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served<'a> {
    /// vhost-user-blk at a socket, with this number of queues.
    VhostUser(&'a Path, u16),
    /// NBD at a socket.
    NbdUnix(&'a Path),
    /// NBD at a host and a port.
    NbdTcp(&'a str, u16),
}

/// Why there is no such text.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Unspeakable {
    /// The monitor does not know this way.
    #[error("{monitor} cannot use a disk served over {served}: {instead}")]
    Way {
        /// The monitor.
        monitor: &'static str,
        /// The way.
        served: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// The monitor's syntax cannot express this word.
    #[error("{monitor} cannot express {word:?}: use a name without {without}")]
    Word {
        /// The monitor.
        monitor: &'static str,
        /// The text.
        word: String,
        /// The characters that it must not contain.
        without: &'static str,
    },
}

/// Properties of the disk that a monitor must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Whether it can only be read.
    pub read_only: bool,
    /// Its logical block size in bytes. QEMU takes it from a vhost-user disk, and gives one over NBD 512.
    pub block: u32,
}

/// The text for a monitor.
pub fn text(monitor: Monitor, served: Served<'_>, disk: Properties) -> Result<String, Unspeakable> {
    match monitor {
        Monitor::Qemu => Ok(qemu(served, disk, Reconnect::SLOW)),
        Monitor::Qemu92 => Ok(qemu(served, disk, Reconnect::FAST)),
        Monitor::Libvirt => Ok(libvirt::definition(served, disk)),
        Monitor::LibvirtDevice => Ok(libvirt::device(served, disk)),
        Monitor::CloudHypervisor => cloud_hypervisor(served, disk.read_only),
    }
}

fn qemu(served: Served<'_>, disk: Properties, reconnect: Reconnect) -> String {
    match served {
        Served::VhostUser(socket, queues) => qemu_vhost_user(socket, queues, reconnect),
        Served::NbdUnix(socket) => {
            qemu_nbd(&format!("server.type=unix,server.path={}", qemu_value(&socket.display().to_string())), disk)
        }
        Served::NbdTcp(host, port) => {
            qemu_nbd(&format!("server.type=inet,server.host={},server.port={port}", qemu_value(host)), disk)
        }
    }
}

/// The guest's memory must be shared with the disk process, hence the memfd; its size is the guest's own `-m`. With
/// `reconnect` the guest continues when the disk process has been restarted. No option for that works with every QEMU:
/// 10.2 has removed the old one.
fn qemu_vhost_user(socket: &Path, queues: u16, reconnect: Reconnect) -> String {
    let socket = format!("socket,id=tapline0,path={},{reconnect}", qemu_value(&socket.display().to_string()));
    let socket = shell_word(&socket);
    format!(
        "-m 1G \\\n\
         -object memory-backend-memfd,id=memory0,size=1G,share=on \\\n\
         -machine memory-backend=memory0 \\\n\
         -chardev {socket} \\\n\
         -device vhost-user-blk-pci,chardev=tapline0,num-queues={queues}\n"
    )
}

fn qemu_nbd(server: &str, disk: Properties) -> String {
    let read_only = if disk.read_only { "on" } else { "off" };
    let block = match disk.block {
        512 => String::new(),
        block => format!(",logical_block_size={block},physical_block_size={block}"),
    };
    let node = format!("driver=nbd,node-name=tapline0,{server},discard=unmap,read-only={read_only}");
    format!("-blockdev {} \\\n-device virtio-blk-pci,drive=tapline0{block}\n", shell_word(&node))
}

/// It refuses more queues than the guest has processors, and vhost-user without shared memory; `path` must not be
/// there.
fn cloud_hypervisor(served: Served<'_>, read_only: bool) -> Result<String, Unspeakable> {
    const MONITOR: &str = "Cloud Hypervisor";
    let (socket, queues) = match served {
        Served::VhostUser(socket, queues) => (socket.display().to_string(), queues),
        Served::NbdUnix(_) | Served::NbdTcp(..) => {
            return Err(Unspeakable::Way { monitor: MONITOR, served: "NBD", instead: "serve it with --vhost-user" });
        }
    };
    let value = cloud_hypervisor_value(&socket).ok_or_else(|| Unspeakable::Word {
        monitor: MONITOR,
        word: socket.clone(),
        without: "commas, brackets, quotes and equals signs",
    })?;
    let read_only = if read_only { ",readonly=on" } else { "" };
    let disk = format!("vhost_user=on,socket={value},num_queues={queues},queue_size=128{read_only}");
    Ok(format!("--cpus boot={queues} \\\n--memory size=1G,shared=on \\\n--disk {}\n", shell_word(&disk)))
}

/// A line of xl's configuration for an image, followed by its parents, `FORMAT:PATH` each. xl only knows its own
/// backends, and its `backendtype=standalone` is for virtio disks; so its block script starts the process that serves
/// the image.
pub fn xl(layers: &[&str], vdev: &str, read_only: bool) -> Result<String, Unspeakable> {
    for layer in layers {
        if layer.contains(char::is_whitespace) || xl_value(layer).is_none() {
            let (word, without) = ((*layer).to_owned(), "blanks and apostrophes");
            return Err(Unspeakable::Word { monitor: "xl", word, without });
        }
    }
    let access = if read_only { "ro" } else { "rw" };
    Ok(format!("disk = [ 'vdev={vdev},access={access},script=block-tapline,target={}' ]\n", layers.join(" ")))
}

#[cfg(test)]
mod test {
    use super::*;

    fn seen(read_only: bool) -> Properties {
        Properties { read_only, block: 512 }
    }

    fn vhost(monitor: Monitor, path: &str, queues: u16, read_only: bool) -> Result<String, Unspeakable> {
        text(monitor, Served::VhostUser(Path::new(path), queues), seen(read_only))
    }

    #[test]
    fn qemu_gets_shared_memory_and_as_many_queues_as_are_served() {
        let text = vhost(Monitor::Qemu, "/run/a.sock", 4, false).unwrap();
        assert!(text.contains("memory-backend-memfd,id=memory0,size=1G,share=on"), "{text}");
        assert!(text.contains("-chardev socket,id=tapline0,path=/run/a.sock,reconnect=1 \\"), "{text}");
        assert!(text.contains("vhost-user-blk-pci,chardev=tapline0,num-queues=4"), "{text}");
        let newer = vhost(Monitor::Qemu92, "/run/a.sock", 4, false).unwrap();
        assert_eq!(newer, text.replace("reconnect=1", "reconnect-ms=100"));
    }

    #[test]
    fn odd_paths_survive_every_syntax() {
        let path = "/run/it's <a>, b.sock";
        let qemu = text(Monitor::Qemu, Served::NbdUnix(Path::new(path)), seen(true)).unwrap();
        assert!(qemu.contains("server.path=/run/it'\\''s <a>,, b.sock,discard=unmap,read-only=on'"), "{qemu}");
        let libvirt = vhost(Monitor::Libvirt, path, 1, false).unwrap();
        assert!(libvirt.contains("path='/run/it&apos;s &lt;a>, b.sock'"), "{libvirt}");
        let error = vhost(Monitor::CloudHypervisor, path, 1, false).unwrap_err();
        assert!(error.to_string().contains("use a name without commas"), "{error}");
    }

    #[test]
    fn libvirt_gets_a_network_disk_for_nbd() {
        let text = text(Monitor::Libvirt, Served::NbdTcp("::1", 10809), seen(true)).unwrap();
        assert!(text.contains("<host name='::1' port='10809'/>"), "{text}");
        assert!(text.contains("<readonly/>"), "{text}");
    }

    #[test]
    fn sectors_of_4096_are_set_only_where_qemu_does_not_find_them() {
        let large = Properties { read_only: false, block: 4096 };
        let (nbd, vhost) = (Served::NbdTcp("::1", 10809), Served::VhostUser(Path::new("/a.sock"), 1));
        let set = [
            (Monitor::Qemu, ",logical_block_size=4096,physical_block_size=4096"),
            (Monitor::Libvirt, "<blockio logical_block_size='4096' physical_block_size='4096'/>"),
        ];
        for (monitor, words) in set {
            assert!(text(monitor, nbd, large).unwrap().contains(words));
            assert!(!text(monitor, nbd, seen(false)).unwrap().contains("block_size"));
            assert!(!text(monitor, vhost, large).unwrap().contains("block_size"));
        }
    }

    #[test]
    fn cloud_hypervisor_gets_shared_memory_and_no_more_queues_than_processors() {
        let text = vhost(Monitor::CloudHypervisor, "/run/a.sock", 2, true).unwrap();
        assert_eq!(
            text,
            "--cpus boot=2 \\\n--memory size=1G,shared=on \\\n\
             --disk vhost_user=on,socket=/run/a.sock,num_queues=2,queue_size=128,readonly=on\n"
        );
    }

    #[test]
    fn xl_gets_the_image_and_its_parents_as_the_script_takes_them() {
        let layers = ["vhd:/images/child.vhd", "vhd:/images/base.vhd"];
        assert_eq!(
            xl(&layers, "xvdb", false).unwrap(),
            "disk = [ 'vdev=xvdb,access=rw,script=block-tapline,target=vhd:/images/child.vhd vhd:/images/base.vhd' ]\n"
        );
        let error = xl(&["vhd:/my images/a"], "xvda", true).unwrap_err();
        assert!(error.to_string().contains("use a name without blanks"), "{error}");
    }

    #[test]
    fn an_unsupported_transport_is_refused_with_an_alternative() {
        let nbd = Served::NbdTcp("::1", 10809);
        let error = text(Monitor::CloudHypervisor, nbd, seen(false)).unwrap_err().to_string();
        assert_eq!(error, "Cloud Hypervisor cannot use a disk served over NBD: serve it with --vhost-user");
    }
}

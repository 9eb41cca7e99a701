//! What to paste into QEMU or libvirt to attach a disk that is served: `serve --print`.
//!
//! It only makes text, from what was asked on the command line; nothing need be served yet.

use std::path::Path;

use crate::cli::PrintFor;

/// Where a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served<'a> {
    /// vhost-user-blk at a socket, with so many queues.
    VhostUser(&'a Path, u16),
    /// NBD at a socket.
    NbdUnix(&'a Path),
    /// NBD at a host and a port.
    NbdTcp(&'a str, u16),
}

/// The text for a program.
pub fn text(target: PrintFor, served: Served<'_>, read_only: bool) -> String {
    match (target, served) {
        (PrintFor::Qemu, Served::VhostUser(socket, queues)) => qemu_vhost_user(socket, queues),
        (PrintFor::Qemu, Served::NbdUnix(socket)) => {
            qemu_nbd(&format!("server.type=unix,server.path={}", qemu_value(&socket.display().to_string())), read_only)
        }
        (PrintFor::Qemu, Served::NbdTcp(host, port)) => {
            qemu_nbd(&format!("server.type=inet,server.host={},server.port={port}", qemu_value(host)), read_only)
        }
        (PrintFor::Libvirt, Served::VhostUser(socket, queues)) => libvirt_vhost_user(socket, queues),
        (PrintFor::Libvirt, Served::NbdUnix(socket)) => {
            let socket = xml_value(&socket.display().to_string());
            libvirt_nbd(&format!("<host transport='unix' socket='{socket}'/>"), read_only)
        }
        (PrintFor::Libvirt, Served::NbdTcp(host, port)) => {
            libvirt_nbd(&format!("<host name='{}' port='{port}'/>", xml_value(host)), read_only)
        }
    }
}

/// The guest's memory must be shared with the disk process, hence the memfd; its size is the guest's own `-m`.
fn qemu_vhost_user(socket: &Path, queues: u16) -> String {
    let socket = shell_word(&format!("socket,id=tapline0,path={}", qemu_value(&socket.display().to_string())));
    format!(
        "-m 1G \\\n\
         -object memory-backend-memfd,id=memory0,size=1G,share=on \\\n\
         -machine memory-backend=memory0 \\\n\
         -chardev {socket} \\\n\
         -device vhost-user-blk-pci,chardev=tapline0,num-queues={queues}\n"
    )
}

fn qemu_nbd(server: &str, read_only: bool) -> String {
    let read_only = if read_only { "on" } else { "off" };
    let node = format!("driver=nbd,node-name=tapline0,{server},discard=unmap,read-only={read_only}");
    format!("-blockdev {} \\\n-device virtio-blk-pci,drive=tapline0\n", shell_word(&node))
}

fn libvirt_vhost_user(socket: &Path, queues: u16) -> String {
    let socket = xml_value(&socket.display().to_string());
    format!(
        "<!-- in <domain>: the guest's memory is shared with the disk process -->\n\
         <memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
         <!-- in <devices> -->\n\
         <disk type='vhostuser' device='disk'>\n  \
         <driver name='qemu' type='raw' queues='{queues}'/>\n  \
         <source type='unix' path='{socket}'/>\n  \
         <target dev='vda' bus='virtio'/>\n\
         </disk>\n"
    )
}

fn libvirt_nbd(host: &str, read_only: bool) -> String {
    let read_only = if read_only { "  <readonly/>\n" } else { "" };
    format!(
        "<!-- in <devices> -->\n\
         <disk type='network' device='disk'>\n  \
         <driver name='qemu' type='raw' discard='unmap'/>\n  \
         <source protocol='nbd'>\n    {host}\n  </source>\n  \
         <target dev='vda' bus='virtio'/>\n\
         {read_only}</disk>\n"
    )
}

/// A value in QEMU's key=value syntax, where a comma is written twice.
fn qemu_value(value: &str) -> String {
    value.replace(',', ",,")
}

fn xml_value(value: &str) -> String {
    value.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

/// Quoted for a shell if it needs to be.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "=,./_-:%+@".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn qemu_gets_shared_memory_and_as_many_queues_as_are_served() {
        let text = text(PrintFor::Qemu, Served::VhostUser(Path::new("/run/a.sock"), 4), false);
        assert!(text.contains("memory-backend-memfd,id=memory0,size=1G,share=on"), "{text}");
        assert!(text.contains("-chardev socket,id=tapline0,path=/run/a.sock \\"), "{text}");
        assert!(text.contains("vhost-user-blk-pci,chardev=tapline0,num-queues=4"), "{text}");
    }

    #[test]
    fn odd_paths_survive_every_syntax() {
        let path = Path::new("/run/it's <a>, b.sock");
        let qemu = text(PrintFor::Qemu, Served::NbdUnix(path), true);
        assert!(qemu.contains("server.path=/run/it'\\''s <a>,, b.sock,discard=unmap,read-only=on'"), "{qemu}");
        let libvirt = text(PrintFor::Libvirt, Served::VhostUser(path, 1), false);
        assert!(libvirt.contains("path='/run/it&apos;s &lt;a>, b.sock'"), "{libvirt}");
    }

    #[test]
    fn libvirt_gets_a_network_disk_for_nbd() {
        let text = text(PrintFor::Libvirt, Served::NbdTcp("::1", 10809), true);
        assert!(text.contains("<host name='::1' port='10809'/>"), "{text}");
        assert!(text.contains("<readonly/>"), "{text}");
    }
}

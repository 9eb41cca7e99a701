//! Event channels through `/dev/xen/evtchn`.
//!
//! It knows nothing about what an event means, and keeps no list of its own: the kernel masks a port when it reports it
//! and until it is written back, so a port that signals continuously is read once.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, read, write};
use rustix::ioctl::Opcode;

use super::{Device, code};
use crate::{DomId, EventChannels, Port};

const DEVICE: &str = "/dev/xen/evtchn";

/// Maximum ports per read; there is one for each queue of a disk, so this covers all of them.
const TAKEN_MAX: usize = 64;

#[repr(C)]
struct BindInterdomain {
    remote_domain: u32,
    remote_port: u32,
}
const _: () = assert!(size_of::<BindInterdomain>() == 8);

const BIND_INTERDOMAIN: Opcode = code(b'E', 1, size_of::<BindInterdomain>());
const BIND_UNBOUND_PORT: Opcode = code(b'E', 2, size_of::<u32>());
const UNBIND: Opcode = code(b'E', 3, size_of::<u32>());
const NOTIFY: Opcode = code(b'E', 4, size_of::<u32>());
const RESTRICT_DOMID: Opcode = code(b'E', 6, size_of::<u16>());
// The values of the header's macros on x86 and ARM.
const _: () = assert!(BIND_INTERDOMAIN == 0x0008_4501 && BIND_UNBOUND_PORT == 0x0004_4502);
const _: () = assert!(UNBIND == 0x0004_4503 && NOTIFY == 0x0004_4504 && RESTRICT_DOMID == 0x0002_4506);

/// Event channels bound by this process. Dropping this closes them.
pub struct Evtchn {
    device: Device,
}

impl Evtchn {
    /// Opens the device.
    pub fn open() -> io::Result<Evtchn> {
        Device::open(DEVICE).map(|device| Evtchn { device })
    }

    /// Uses a device opened by another process.
    pub fn from_fd(device: OwnedFd) -> Evtchn {
        Evtchn { device: Device { name: DEVICE, fd: device } }
    }

    /// Opens the device for a process that cannot do so itself, restricted to channels of `domain`.
    pub fn open_restricted_fd(domain: DomId) -> io::Result<OwnedFd> {
        let device = Device::open(DEVICE)?;
        // SAFETY: a structure with the domain as its only field.
        let result = unsafe { device.call::<RESTRICT_DOMID, _>(&mut { domain.0 }) };
        result.map_err(|source| device.failed(format!("cannot restrict it to domain {domain}"), source))?;
        Ok(device.fd)
    }

    /// Allocates a port that `domain` may bind: what a front end does.
    pub fn offer(&self, domain: DomId) -> io::Result<Port> {
        // SAFETY: a structure with the domain as its only field.
        let port = unsafe { self.device.call::<BIND_UNBOUND_PORT, _>(&mut { u32::from(domain.0) }) };
        let failed = |source| self.device.failed(format!("cannot offer an event channel to domain {domain}"), source);
        let port = port.map_err(|errno| failed(io::Error::from(errno)))?;
        Ok(Port(u32::try_from(port).map_err(|_| failed(io::ErrorKind::InvalidData.into()))?))
    }
}

impl EventChannels for Evtchn {
    fn bind(&mut self, domain: DomId, remote: Port) -> io::Result<Port> {
        let mut bind = BindInterdomain { remote_domain: u32::from(domain.0), remote_port: remote.0 };
        // SAFETY: the structure of this call.
        let port = unsafe { self.device.call::<BIND_INTERDOMAIN, _>(&mut bind) };
        let failed = |source| self.device.failed(format!("cannot bind port {} of domain {domain}", remote.0), source);
        let port = port.map_err(|errno| failed(io::Error::from(errno)))?;
        Ok(Port(u32::try_from(port).map_err(|_| failed(io::ErrorKind::InvalidData.into()))?))
    }

    fn unbind(&mut self, port: Port) -> io::Result<()> {
        // SAFETY: a structure with the port as its only field.
        let result = unsafe { self.device.call::<UNBIND, _>(&mut { port.0 }) };
        result.map_err(|source| self.device.failed(format!("cannot unbind port {}", port.0), source))?;
        Ok(())
    }

    fn notify(&mut self, port: Port) -> io::Result<()> {
        // SAFETY: a structure with the port as its only field.
        let result = unsafe { self.device.call::<NOTIFY, _>(&mut { port.0 }) };
        result.map_err(|source| self.device.failed(format!("cannot signal port {}", port.0), source))?;
        Ok(())
    }

    fn take(&mut self, ports: &mut Vec<Port>) -> io::Result<bool> {
        let mut bytes = [0; TAKEN_MAX * size_of::<u32>()];
        let len = match read(&self.device.fd, &mut bytes) {
            Ok(len) => len,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(source) => return Err(self.device.failed("cannot read the signalled ports", source).into()),
        };
        let numbers = bytes.get(..len).unwrap_or_default().chunks_exact(size_of::<u32>());
        ports
            .extend(numbers.filter_map(|number| number.try_into().ok()).map(|number| Port(u32::from_ne_bytes(number))));
        Ok(len == bytes.len())
    }

    fn unmask(&mut self, port: Port) -> io::Result<()> {
        loop {
            match write(&self.device.fd, &port.0.to_ne_bytes()) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(source) => return Err(self.device.failed(format!("cannot unmask port {}", port.0), source).into()),
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

//! Grants and event channels of Linux user space: `/dev/xen/gntdev` and `/dev/xen/evtchn`; and, for test guests,
//! `/dev/xen/gntalloc`.
//!
//! It knows nothing about what guests do with them. Invariant: structures passed to the kernel have the layout of its
//! headers (include/uapi/xen/gntdev.h, gntalloc.h and evtchn.h), checked at compile time.

mod evtchn;
mod gntalloc;
mod gntdev;

pub use evtchn::Evtchn;
pub use gntalloc::{Gntalloc, GrantedPages};
pub use gntdev::Gntdev;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Direction, Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// A system call on one of the kernel's devices failed.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {what}{}{}", if .advice.is_empty() { "" } else { ": " }, .advice)]
pub struct DeviceError {
    /// The device.
    pub device: &'static str,
    /// What was tried, on what.
    pub what: String,
    /// What to do.
    pub advice: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

impl From<DeviceError> for io::Error {
    fn from(error: DeviceError) -> io::Error {
        io::Error::new(error.source.kind(), error)
    }
}

/// An open device.
struct Device {
    name: &'static str,
    fd: OwnedFd,
}

impl Device {
    fn open(name: &'static str) -> io::Result<Device> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(name);
        let file = opened.map_err(|source| {
            let advice = match source.kind() {
                io::ErrorKind::NotFound => {
                    "this is not a Xen domain, or its modules xen-gntdev and xen-evtchn are not loaded"
                }
                io::ErrorKind::PermissionDenied => {
                    "permission denied; run as root, or as a user that the device's mode admits"
                }
                _ => "check the device",
            };
            DeviceError { device: name, what: "cannot open".to_owned(), advice, source }
        })?;
        Ok(Device { name, fd: file.into() })
    }

    /// # Safety
    /// `argument`, and what it points to, must be what the kernel expects for `OPCODE`.
    unsafe fn call<const OPCODE: Opcode, T: ?Sized>(&self, argument: &mut T) -> Result<IoctlOutput, Errno> {
        // SAFETY: this function's contract.
        unsafe { ioctl(&self.fd, Call::<OPCODE, T>(argument)) }
    }

    fn failed(&self, what: impl Into<String>, source: impl Into<io::Error>) -> DeviceError {
        DeviceError { device: self.name, what: what.into(), advice: "", source: source.into() }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The number of an ioctl, as both headers define it: without a direction.
const fn code(group: u8, number: u8, size: usize) -> Opcode {
    opcode::from_components(Direction::None, group, number, size)
}

/// An ioctl with a structure that the kernel reads and writes.
struct Call<'a, const OPCODE: Opcode, T: ?Sized>(&'a mut T);

// SAFETY: created only by `Device::call`, whose caller promises that argument and opcode match; the argument is
// borrowed exclusively while the kernel may write to it.
unsafe impl<const OPCODE: Opcode, T: ?Sized> Ioctl for Call<'_, OPCODE, T> {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(out)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_error_for_a_missing_device_names_it_and_says_what_to_do() {
        let error = Device::open("/dev/xen/there-is-no-such-device").map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(
            error.to_string().starts_with("/dev/xen/there-is-no-such-device: cannot open: this is not a Xen domain")
        );
    }

    #[test]
    fn the_error_for_a_failed_call_names_the_device() {
        let device = Device::open("/dev/null").unwrap();
        // SAFETY: no driver of /dev/null uses the argument.
        let result = unsafe { device.call::<{ code(b'E', 4, 4) }, _>(&mut 1u32) };
        let error = io::Error::from(device.failed("cannot signal port 1", result.unwrap_err()));
        assert_eq!(error.to_string(), "/dev/null: cannot signal port 1");
    }
}

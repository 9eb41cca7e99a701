//! Grants and event channels as Linux has them for user space: `/dev/xen/gntdev` and `/dev/xen/evtchn`; and, for who plays the
//! guest, `/dev/xen/gntalloc`.
//!
//! Knows nothing of what guests do with them. Keeps: what the kernel is given has the layout of its headers
//! (include/uapi/xen/gntdev.h, gntalloc.h and evtchn.h), checked at compile time.

mod evtchn;
mod gntalloc;
mod gntdev;

pub use evtchn::Evtchn;
pub use gntalloc::{Gntalloc, Offered};
pub use gntdev::Gntdev;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Direction, Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// A device of the kernel did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {what}{}{}", if .advice.is_empty() { "" } else { ": " }, .advice)]
pub struct DeviceError {
    /// The device.
    pub device: &'static str,
    /// What was tried, on what.
    pub what: String,
    /// What may be done.
    pub advice: &'static str,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

impl From<DeviceError> for io::Error {
    fn from(error: DeviceError) -> io::Error {
        io::Error::new(error.source.kind(), error)
    }
}

/// A device, open.
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
                io::ErrorKind::PermissionDenied => "only root may use it, or whom the device's owner lets",
                _ => "it cannot be opened",
            };
            DeviceError { device: name, what: "cannot open".to_owned(), advice, source }
        })?;
        Ok(Device { name, fd: file.into() })
    }

    /// # Safety
    /// `argument` must be what the kernel takes, and what it points to as well, for `OPCODE`.
    unsafe fn call<const OPCODE: Opcode, T: ?Sized>(&self, argument: &mut T) -> Result<IoctlOutput, Errno> {
        // SAFETY: the caller's promise.
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

/// The number of a call, as both headers make it: without a direction.
const fn code(group: u8, number: u8, size: usize) -> Opcode {
    opcode::from_components(Direction::None, group, number, size)
}

/// A call with a structure that is read, and written, by the kernel.
struct Call<'a, const OPCODE: Opcode, T: ?Sized>(&'a mut T);

// SAFETY: made by `Device::call` only, whose caller promises that argument and opcode belong together; the argument is
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
    fn a_device_that_is_missing_is_named_with_what_to_do() {
        let error = Device::open("/dev/xen/there-is-no-such-device").map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(
            error.to_string().starts_with("/dev/xen/there-is-no-such-device: cannot open: this is not a Xen domain")
        );
    }

    #[test]
    fn a_call_that_fails_names_the_device() {
        let device = Device::open("/dev/null").unwrap();
        // SAFETY: no driver of /dev/null looks at the argument.
        let result = unsafe { device.call::<{ code(b'E', 4, 4) }, _>(&mut 1u32) };
        let error = io::Error::from(device.failed("cannot signal port 1", result.unwrap_err()));
        assert_eq!(error.to_string(), "/dev/null: cannot signal port 1");
    }
}

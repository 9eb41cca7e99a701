//! The default serial number of a disk.
//!
//! It is derived from the identity of the lowest layer, which snapshots and merges do not change: from its UUID, or if
//! the format has none, from its path. So it is the same when the disk is served again. Clones of one image have the
//! same serial number; a guest that uses two of them needs `--serial`. Invariant: the successor of a process keeps the
//! serial number, whatever its layers are by then.

use std::path::Path;
use std::sync::OnceLock;

use arguments::Serve;
use disk::Image;

use crate::image::chain::Layers;

/// The number of digits, limited by virtio.
const DIGITS: usize = 20;

/// The serial number of this process's disk, if its transport has one.
static IN_FORCE: OnceLock<String> = OnceLock::new();

/// Chooses the serial number of a disk: that of the command line, if there is one.
pub fn choose(serve: &Serve, layers: &Layers) {
    if serve.vhost_user.is_none() {
        return;
    }
    let chosen = match &serve.serial {
        Some(given) => given.clone(),
        None => of_lowest(layers),
    };
    IN_FORCE.get_or_init(|| chosen);
}

/// Returns the serial number of this process's disk.
pub fn in_force() -> Option<&'static str> {
    IN_FORCE.get().map(String::as_str)
}

fn of_lowest(layers: &Layers) -> String {
    match layers.images.last().map(Image::identity).filter(|identity| *identity != [0; 16]) {
        Some(identity) => hex(u128::from_be_bytes(identity) >> (128 - 4 * DIGITS)),
        None => {
            let name = layers.names.last().unwrap_or(&layers.name);
            if name.uri().is_some() {
                return of_path(name.path());
            }
            // Links are not resolved: the device of a volume may have another number after each boot.
            let path = std::path::absolute(name.path()).unwrap_or_else(|_| name.path().to_owned());
            of_path(&path)
        }
    }
}

/// Returns a digest of a path (FNV-1a of 128 bits, folded).
fn of_path(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let digest =
        path.as_os_str().as_bytes().iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |sum, &byte| {
            (sum ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
        });
    hex((digest ^ digest >> (128 - 4 * DIGITS)) & ((1 << (4 * DIGITS)) - 1))
}

fn hex(number: u128) -> String {
    format!("{number:0DIGITS$x}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_serial_number_is_short_and_printable() {
        assert_eq!(hex(0x12), "00000000000000000012");
        let of = |path: &str| of_path(Path::new(path));
        assert_eq!(of("/srv/customer-portal-production-a").len(), DIGITS);
        assert_ne!(of("/srv/customer-portal-production-a"), of("/srv/customer-portal-production-b"));
    }
}

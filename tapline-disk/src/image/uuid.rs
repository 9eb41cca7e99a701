//! UUIDs of images.

pub use disk::vhd::uuid_text as text;
use rustix::rand::GetRandomFlags;

/// Makes a random uuid (RFC 9562, version 4).
pub fn new() -> std::io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    let got = rustix::rand::getrandom(&mut uuid[..], GetRandomFlags::empty())?;
    if got != uuid.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    uuid[6] = (uuid[6] & 0x0f) | 0x40;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    Ok(uuid)
}

/// Formats a uuid; `None` if it is all zeroes, which means that there is none.
pub fn known(uuid: &[u8; 16]) -> Option<String> {
    (*uuid != [0; 16]).then(|| text(uuid))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn uuids_are_random_of_version_4() {
        let (one, other) = (new().unwrap(), new().unwrap());
        assert_ne!(one, other);
        assert_eq!((one[6] >> 4, one[8] >> 6), (4, 2));
    }
}

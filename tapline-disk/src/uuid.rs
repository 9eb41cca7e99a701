//! Identities of images: made, and written as people write them.

use rustix::rand::GetRandomFlags;

/// A random uuid (RFC 9562, version 4).
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

/// `01234567-89ab-cdef-0123-456789abcdef`.
pub fn text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
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

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(text(&uuid), "01234567-89ab-cdef-0102-030405060708");
    }
}

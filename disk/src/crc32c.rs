//! CRC-32C (Castagnoli), as VHDX and our maps of changed blocks have it.

/// The remainders of all bytes.
const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        // The conversion is exact: the counter stays below 256.
        #[allow(clippy::cast_possible_truncation)]
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        // In range, and evaluated by the compiler.
        #[allow(clippy::indexing_slicing)]
        {
            table[byte] = crc;
        }
        byte += 1;
    }
    table
}

/// The checksum of some bytes.
pub(crate) fn crc32c(bytes: impl Iterator<Item = u8>) -> u32 {
    !bytes.fold(u32::MAX, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        crc >> 8 ^ TABLE.get(usize::from(low ^ byte)).copied().unwrap_or_default()
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_checksum_is_the_known_one() {
        assert_eq!(crc32c(b"123456789".iter().copied()), 0xe306_9283);
    }
}

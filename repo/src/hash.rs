//! The hash that distinguishes histories and detects damage. It is not a security feature.

use ring::digest::{SHA256, digest};

/// Digits of a hash: 128 bits of SHA-256.
pub const DIGITS: usize = 32;

/// 128 bits of SHA-256, as digits.
pub fn hash(text: &str) -> String {
    let hash = digest(&SHA256, text.as_bytes());
    let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    digits.chars().take(DIGITS).collect()
}

//! Escapes words for the syntaxes of their readers: QEMU, XML, a shell, Cloud Hypervisor, a terminal.
//!
//! It knows nothing about the words' meaning. Each function returns text that its reader understands as exactly the
//! input.

use std::error::Error;

/// A value in QEMU's key=value syntax, where a comma is written twice.
pub fn qemu_value(value: &str) -> String {
    value.replace(',', ",,")
}

/// A value in an attribute of XML between apostrophes, or between tags.
pub fn xml_value(value: &str) -> String {
    value.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

/// Quoted for a shell if it needs to be.
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "=,./_-:%+@".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// A value in Cloud Hypervisor's key=value syntax, which has no agreed way to escape separators.
pub fn cloud_hypervisor_value(value: &str) -> Option<&str> {
    (!value.contains([',', '[', ']', '"', '='])).then_some(value)
}

/// A string in xl's configuration between apostrophes, which cannot contain one.
pub fn xl_value(value: &str) -> Option<&str> {
    (!value.contains(['\'', '\n'])).then_some(value)
}

/// Text of unknown origin for people, without what could steer their terminal, turn the direction of writing or not be
/// seen: one name must not look like another.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_unseen(c) { '\u{fffd}' } else { c }).collect()
}

/// Whether a character that is no control character has an effect other than being seen.
fn is_unseen(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// An error and what caused it, in one line.
pub fn in_full(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| Error::source(cause));
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn untrusted_names_cannot_control_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(printable("web\u{202e}gpj.exe\u{200b}"), "web\u{fffd}gpj.exe\u{fffd}");
        assert_eq!(printable("データ شبكة №1"), "データ شبكة №1");
    }

    #[test]
    fn separators_are_escaped() {
        assert_eq!(qemu_value("a,b"), "a,,b");
        assert_eq!(xml_value("it's <a> & b"), "it&apos;s &lt;a> &amp; b");
        assert_eq!(shell_word("it's"), "'it'\\''s'");
        assert_eq!(shell_word("path=/run/a.sock"), "path=/run/a.sock");
    }

    #[test]
    fn inexpressible_text_is_none() {
        assert_eq!(cloud_hypervisor_value("/run/a"), Some("/run/a"));
        assert_eq!(cloud_hypervisor_value("/run/a,b"), None);
        assert_eq!(xl_value("vhd:/a b"), Some("vhd:/a b"));
        assert_eq!(xl_value("vhd:/it's"), None);
    }
}

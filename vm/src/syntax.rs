//! Escapes words for the syntaxes of their readers: QEMU, XML, a shell, Cloud Hypervisor, xl.
//!
//! It knows nothing about the words' meaning. Each function returns text that its reader understands as exactly the
//! input.

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

#[cfg(test)]
mod test {
    use super::*;

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

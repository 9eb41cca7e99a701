//! Digests of whole files, and the lists of them that are published next to images: the lines of `sha256sum` and those
//! of BSD (`SHA256 (NAME) = HEX`), also within a PGP signature, which is not verified.
//!
//! Invariant: a digest is used for a file only if the list names it for that very name, or is nothing but one digest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use control::checksum::{Algorithm, Checksum, Digest};
use ring::digest::{Context, SHA256, SHA512};

use crate::client::Client;
use crate::error::{Fault, HttpError, HttpErrorKind};
use crate::object::retry;
use crate::url::{BadUrl, Url};

/// Much longer than any list.
const LIST_MAX: usize = 4 << 20;
/// Bytes of the file that are read at once.
const CHUNK: usize = 1 << 20;

/// Finds the digest that the object at a URL must have. A list over plain HTTP is no proof: it is read only if the
/// client may do that.
pub fn find(client: &Arc<Client>, url: &Url, checksum: &Checksum) -> Result<Digest, HttpError> {
    match checksum {
        Checksum::Is(digest) => Ok(digest.clone()),
        Checksum::In(list) => {
            let list: Url =
                list.parse().map_err(|why: BadUrl| refused(url, format!("the URL of its checksum: {why}")))?;
            let text = fetch(client, &list)?;
            digest_in(&text, &url.name())
                .ok_or_else(|| refused(&list, format!("it has no SHA-256 or SHA-512 digest of '{}'", url.name())))
        }
        Checksum::Auto => find_beside(client, url),
    }
}

fn find_beside(client: &Arc<Client>, url: &Url) -> Result<Digest, HttpError> {
    let lists =
        [url.sibling("SHA256SUMS"), url.sibling("SHA512SUMS"), url.with_suffix(".sha256"), url.with_suffix(".sha512")];
    for list in lists {
        let list = list.map_err(|why| refused(url, why.to_string()))?;
        match fetch(client, &list) {
            Ok(text) => {
                if let Some(digest) = digest_in(&text, &url.name()) {
                    return Ok(digest);
                }
            }
            Err(error) if error.kind == HttpErrorKind::Missing => {}
            Err(error) => return Err(error),
        }
    }
    let why = "its digest is neither in SHA256SUMS or SHA512SUMS next to it, nor in files of its name with .sha256 or \
               .sha512";
    Err(HttpError::new(url, HttpErrorKind::Missing, why).advise("give the digest, or the URL of a list: --checksum"))
}

fn refused(url: &Url, why: impl Into<String>) -> HttpError {
    HttpError::new(url, HttpErrorKind::Refused, why)
}

/// Reads a list.
fn fetch(client: &Client, list: &Url) -> Result<String, HttpError> {
    client.check(list)?;
    let bytes = retry(
        client,
        list,
        client.options.patience,
        &mut |_| {
            let answer = client.get(list, &[])?;
            if answer.status.as_u16() != 200 {
                return Err(answer.fault());
            }
            answer.must_be_plain()?;
            answer.at_most(LIST_MAX, client.options.stopping)
        },
        &mut |fault| matches!(fault, Fault::Transient { wait: Some(_), .. }),
    )?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The digest of the file `name` in a list; the longer one if there are two.
fn digest_in(text: &str, name: &str) -> Option<Digest> {
    let mut words = text.split_whitespace();
    if let (Some(word), None) = (words.next(), words.next()) {
        return Digest::of_hex(word);
    }
    let found = text.lines().filter_map(|line| in_line(line.trim_end(), name));
    found.max_by_key(|digest| digest.algorithm.bytes())
}

fn in_line(line: &str, name: &str) -> Option<Digest> {
    let is_it = |found: &str| found.strip_prefix("./").unwrap_or(found) == name;
    if let Some((kind, rest)) = line.split_once(" (") {
        let (found, hex) = rest.rsplit_once(") = ")?;
        let digest = Digest::of_hex(hex.trim()).filter(|_| is_it(found))?;
        return kind.eq_ignore_ascii_case(digest.algorithm.word()).then_some(digest);
    }
    let (hex, rest) = line.split_once(' ')?;
    // GNU coreutils: a second space, or an asterisk for a file that is read as binary.
    let found = rest.strip_prefix([' ', '*']).unwrap_or(rest).trim_start();
    Digest::of_hex(hex).filter(|_| is_it(found))
}

/// Computes the digest of the first `len` bytes of a file; `progress` receives how many have been read, and returns
/// false to end that.
pub fn digest_of(
    file: &File,
    len: u64,
    algorithm: Algorithm,
    progress: &mut dyn FnMut(u64) -> bool,
) -> io::Result<Digest> {
    let mut context = Context::new(match algorithm {
        Algorithm::Sha256 => &SHA256,
        Algorithm::Sha512 => &SHA512,
    });
    let (mut at, mut chunk) = (0, vec![0; CHUNK]);
    while at < len {
        let most = usize::try_from(len - at).unwrap_or(CHUNK).min(CHUNK);
        let bytes = chunk.get_mut(..most).unwrap_or_default();
        file.read_exact_at(bytes, at)?;
        context.update(bytes);
        at += u64::try_from(most).unwrap_or(u64::MAX);
        if !progress(at) {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    let computed = context.finish();
    Ok(Digest::new(algorithm, computed.as_ref()).unwrap_or_else(|| unreachable!("the length is the algorithm's")))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_list_has_the_digest_of_the_very_name() {
        let (a, b, c) = ("0a".repeat(32), "0b".repeat(32), "0c".repeat(64));
        let gnu = format!("{a}  x.img\n{b} *./y.img\r\n{c}  y.img\n{a} z z.img\nnonsense\n");
        let found = |text: &str, name: &str| digest_in(text, name).map(|digest| digest.to_string());
        assert_eq!(found(&gnu, "x.img"), Some(format!("sha256:{a}")));
        assert_eq!(found(&gnu, "y.img"), Some(format!("sha512:{c}")), "the stronger one");
        assert_eq!(found(&gnu, "z z.img"), Some(format!("sha256:{a}")));
        assert_eq!(found(&gnu, "img"), None);
        let bsd = format!("-----BEGIN PGP SIGNED MESSAGE-----\n\n# x\nSHA256 (x (1).img) = {a}\nSHA512 (y) = {b}\n");
        assert_eq!(found(&bsd, "x (1).img"), Some(format!("sha256:{a}")));
        assert_eq!(found(&bsd, "y"), None, "the length is of another algorithm");
        assert_eq!(found(&format!("{b}\n"), "any"), Some(format!("sha256:{b}")));
        assert_eq!(found("", "any"), None);
    }

    #[test]
    fn the_digest_of_a_file_is_that_of_its_first_bytes() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"abc and more", 0).unwrap();
        // FIPS 180-2, appendix B.1.
        let expected = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = digest_of(&file, 3, Algorithm::Sha256, &mut |_| true).unwrap();
        assert_eq!(digest.to_string(), expected);
        assert!(digest_of(&file, 100, Algorithm::Sha512, &mut |_| true).is_err(), "the file is shorter");
        assert!(digest_of(&file, 3, Algorithm::Sha512, &mut |_| false).is_err(), "it is ended");
    }
}

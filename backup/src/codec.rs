//! Digests, compression and encryption of what is stored.
//!
//! Two shapes: a *frame* is a chunk or page, proven by its digest; a *sealed* object is proven by a tag over itself,
//! its kind and its name. Knows nothing about stores.
//!
//! Invariants: nothing that is opened here is returned before it is proven. On an encrypted target all digests are
//! keyed, and no unencrypted object is accepted. Objects cannot stand in for one another: kind and name, or digest, are
//! authenticated with each.

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305};
use zstd_safe::{CCtx, compress_bound};

use crate::id::{Digest, Id, random};
use crate::key::Key;
use crate::name::Name;

/// Kinds of content. Each has digests of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Format,
    Log,
    Index,
    Toc,
    Page,
    Chunk,
    /// The content of a whole disk.
    Disk,
}

impl Kind {
    const ALL: [Kind; 7] = [Kind::Format, Kind::Log, Kind::Index, Kind::Toc, Kind::Page, Kind::Chunk, Kind::Disk];

    const fn number(self) -> u8 {
        match self {
            Kind::Format => 0,
            Kind::Log => 1,
            Kind::Index => 2,
            Kind::Toc => 3,
            Kind::Page => 4,
            Kind::Chunk => 5,
            Kind::Disk => 6,
        }
    }

    pub const fn code(self) -> u8 {
        self.number()
    }

    /// The kind of a frame with this code.
    pub fn of_frame(code: u8) -> Option<Kind> {
        [Kind::Page, Kind::Chunk].into_iter().find(|kind| kind.number() == code)
    }
}

/// The bytes are not what was written; the text names the difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage(pub &'static str);

const COMPRESSED: u8 = 1;
const ENCRYPTED: u8 = 2;
const NONCE: usize = 24;
const TAG: usize = 32;
/// Magic, flags, length before compression.
const HEADER: usize = 13;
const MAGIC: [u8; 8] = *b"tapl-bk1";

/// A sealed object is an index, a table or a log entry; an index of 64 TiB has 80 MiB.
const SEALED_MAX: u32 = 256 << 20;

/// Digests, compresses and encrypts for one target.
pub(crate) struct Codec {
    keys: [[u8; 32]; Kind::ALL.len()],
    cipher: Option<XChaCha20Poly1305>,
    level: i32,
}

/// A compressor with its memory, one for each thread.
pub(crate) struct Compressor(CCtx<'static>);

impl Compressor {
    pub fn new() -> Compressor {
        Compressor(CCtx::create())
    }

    /// The compressed bytes; `None` unless a sixteenth is saved.
    fn compress(&mut self, plain: &[u8], level: i32) -> Option<Vec<u8>> {
        let mut packed = vec![0; compress_bound(plain.len())];
        let len = self.0.compress(&mut packed[..], plain, level).ok()?;
        packed.truncate(len);
        (len < plain.len() - plain.len() / 16).then_some(packed)
    }
}

impl Codec {
    /// For a target; `key` if it is encrypted.
    pub fn new(target: Id, key: Option<&Key>, level: i32) -> Codec {
        // Digests of unencrypted targets are equal everywhere; those of encrypted ones reveal no known content.
        let material = key.map(|key| [key.secret().as_slice(), target.as_bytes()].concat()).unwrap_or_default();
        let derive = |purpose: &str| blake3::derive_key(&format!("tapline backup 1 {purpose}"), &material);
        Codec {
            keys: Kind::ALL.map(|kind| derive(&format!("digest {kind:?}"))),
            cipher: key.map(|_| XChaCha20Poly1305::new(&derive("encryption").into())),
            level,
        }
    }

    pub fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// The digest of content; its length is part of it.
    pub fn digest(&self, kind: Kind, content: &[u8]) -> Digest {
        let key = self.keys.get(usize::from(kind.number())).copied().unwrap_or_default();
        Digest::from_bytes(*blake3::keyed_hash(&key, content).as_bytes())
    }

    /// Stored form of a chunk or page with this digest.
    pub fn frame(
        &self,
        compressor: &mut Compressor,
        kind: Kind,
        digest: &Digest,
        plain: &[u8],
    ) -> Result<Vec<u8>, Damage> {
        let mut frame = vec![0];
        let flags = self.encode(compressor, plain, &mut frame, |flags| frame_identity(kind, digest, flags))?;
        if let Some(first) = frame.first_mut() {
            *first = flags;
        }
        Ok(frame)
    }

    /// The content of a frame, of `len` bytes, proven by its digest.
    pub fn unframe(&self, kind: Kind, digest: &Digest, len: usize, frame: &[u8]) -> Result<Vec<u8>, Damage> {
        let (&flags, body) = frame.split_first().ok_or(Damage("a chunk is cut off"))?;
        let plain = self.decode(flags, body, len, &frame_identity(kind, digest, flags))?;
        if self.digest(kind, &plain) != *digest {
            return Err(Damage("a chunk does not have its digest"));
        }
        Ok(plain)
    }

    /// Stored form of an object under this name.
    pub fn seal(&self, kind: Kind, name: &Name, plain: &[u8]) -> Result<Vec<u8>, Damage> {
        let len = u32::try_from(plain.len()).ok().filter(|&len| len <= SEALED_MAX);
        let len = len.ok_or(Damage("it would have more than 256 MiB"))?;
        let mut sealed = MAGIC.to_vec();
        sealed.push(0);
        sealed.extend(len.to_le_bytes());
        let identity = |flags| sealed_identity(kind, name, flags, len);
        let mut body = Vec::new();
        let flags = self.encode(&mut Compressor::new(), plain, &mut body, identity)?;
        if let Some(place) = sealed.get_mut(MAGIC.len()) {
            *place = flags;
        }
        sealed.extend(body);
        if self.cipher.is_none() {
            let digest = self.digest(kind, &[&identity(flags), sealed.as_slice()].concat());
            sealed.extend(digest.as_bytes());
        }
        Ok(sealed)
    }

    /// The content of a sealed object under this name.
    pub fn unseal(&self, kind: Kind, name: &Name, sealed: &[u8]) -> Result<Vec<u8>, Damage> {
        let (header, body) = sealed.split_first_chunk::<HEADER>().ok_or(Damage("it is cut off"))?;
        let [magic @ .., flags, l0, l1, l2, l3] = header;
        if *magic != MAGIC {
            return Err(Damage("it does not begin as an object of a backup target"));
        }
        let len = u32::from_le_bytes([*l0, *l1, *l2, *l3]);
        let identity = sealed_identity(kind, name, *flags, len);
        let body = match self.cipher {
            Some(_) => body,
            None => {
                let (body, tag) = body.split_last_chunk::<TAG>().ok_or(Damage("it is cut off"))?;
                let before = sealed.get(..HEADER + body.len()).unwrap_or_default();
                if self.digest(kind, &[&identity, before].concat()) != Digest::from_bytes(*tag) {
                    return Err(Damage("it does not have its digest"));
                }
                body
            }
        };
        let len = usize::try_from(len.min(SEALED_MAX)).map_err(|_| Damage("it is too long"))?;
        self.decode(*flags, body, len, &identity)
    }

    /// Appends compressed and encrypted bytes; returns the flags.
    fn encode(
        &self,
        compressor: &mut Compressor,
        plain: &[u8],
        out: &mut Vec<u8>,
        identity: impl Fn(u8) -> Vec<u8>,
    ) -> Result<u8, Damage> {
        let packed = if self.level == 0 { None } else { compressor.compress(plain, self.level) };
        let mut flags = if packed.is_some() { COMPRESSED } else { 0 };
        let body = packed.as_deref().unwrap_or(plain);
        let Some(cipher) = &self.cipher else {
            out.extend_from_slice(body);
            return Ok(flags);
        };
        flags |= ENCRYPTED;
        let mut nonce = [0; NONCE];
        random(&mut nonce);
        let payload = Payload { msg: body, aad: &identity(flags) };
        // The cipher's only limit is 256 GiB for a message. An empty body in its place would be a chunk that is lost.
        let encrypted = cipher.encrypt(&nonce.into(), payload).map_err(|_| Damage("it could not be encrypted"))?;
        out.extend(nonce);
        out.extend(encrypted);
        Ok(flags)
    }

    fn decode(&self, flags: u8, body: &[u8], len: usize, identity: &[u8]) -> Result<Vec<u8>, Damage> {
        if flags & !(COMPRESSED | ENCRYPTED) != 0 || (flags & ENCRYPTED != 0) != self.is_encrypted() {
            return Err(Damage("its flags are invalid"));
        }
        let decrypted;
        let packed = match &self.cipher {
            None => body,
            Some(cipher) => {
                let (nonce, body) = body.split_first_chunk::<NONCE>().ok_or(Damage("it is cut off"))?;
                let payload = Payload { msg: body, aad: identity };
                let failed = |_| Damage("it was changed, or another object is in its place");
                decrypted = cipher.decrypt(&(*nonce).into(), payload).map_err(failed)?;
                &decrypted
            }
        };
        if flags & COMPRESSED == 0 {
            return if packed.len() == len { Ok(packed.to_vec()) } else { Err(Damage("it has a wrong length")) };
        }
        let mut plain = vec![0; len];
        match zstd_safe::decompress(&mut plain[..], packed) {
            Ok(got) if got == len => Ok(plain),
            _ => Err(Damage("it cannot be decompressed")),
        }
    }
}

fn frame_identity(kind: Kind, digest: &Digest, flags: u8) -> Vec<u8> {
    [&[kind.number(), flags], digest.as_bytes().as_slice()].concat()
}

fn sealed_identity(kind: Kind, name: &Name, flags: u8, len: u32) -> Vec<u8> {
    [&[kind.number(), flags], len.to_le_bytes().as_slice(), name.as_str().as_bytes()].concat()
}

#[cfg(test)]
mod test {
    use super::*;

    fn codecs() -> [Codec; 2] {
        let id = Id::from_bytes([1; 16]);
        [Codec::new(id, None, 1), Codec::new(id, Some(&Key::random()), 1)]
    }

    #[test]
    fn any_flipped_bit_cut_or_swap_is_noticed() {
        for codec in codecs() {
            let plain = b"0123456789".repeat(20);
            let (name, other) = (Name::backup(Id::from_bytes([1; 16])), Name::backup(Id::from_bytes([2; 16])));
            let sealed = codec.seal(Kind::Log, &name, &plain).unwrap();
            assert_eq!(codec.unseal(Kind::Log, &name, &sealed).unwrap(), plain);
            assert!(codec.unseal(Kind::Log, &other, &sealed).is_err(), "swapped with another name");
            assert!(codec.unseal(Kind::Index, &name, &sealed).is_err(), "swapped with another kind");
            let digest = codec.digest(Kind::Chunk, &plain);
            let frame = codec.frame(&mut Compressor::new(), Kind::Chunk, &digest, &plain).unwrap();
            assert_eq!(codec.unframe(Kind::Chunk, &digest, plain.len(), &frame).unwrap(), plain);
            assert!(codec.unframe(Kind::Page, &digest, plain.len(), &frame).is_err());
            for bit in 0..sealed.len() * 8 {
                let mut bad = sealed.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(codec.unseal(Kind::Log, &name, &bad).is_err(), "bit {bit} of an object");
            }
            for bit in 0..frame.len() * 8 {
                let mut bad = frame.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                let got = codec.unframe(Kind::Chunk, &digest, plain.len(), &bad);
                assert!(got.is_err() || got == Ok(plain.clone()), "bit {bit} of a frame");
            }
            for len in 0..sealed.len() {
                assert!(codec.unseal(Kind::Log, &name, &sealed[..len]).is_err(), "cut off at {len}");
            }
            for len in 0..frame.len() {
                assert!(codec.unframe(Kind::Chunk, &digest, plain.len(), &frame[..len]).is_err(), "cut off at {len}");
            }
        }
    }

    #[test]
    fn keyed_digests_and_frames_reveal_no_known_content() {
        let [open, closed] = codecs();
        let digest = closed.digest(Kind::Chunk, b"known");
        assert_ne!(open.digest(Kind::Chunk, b"known"), digest);
        let frame = closed.frame(&mut Compressor::new(), Kind::Chunk, &digest, b"known").unwrap();
        assert!(!frame.windows(5).any(|part| part == b"known"));
        let again = closed.frame(&mut Compressor::new(), Kind::Chunk, &digest, b"known").unwrap();
        assert_ne!(frame, again, "a nonce was reused");
    }
}

//! Certificates in directories that are laid out as QEMU and nbdkit expect, made with openssl.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A certificate authority and its directories.
#[derive(Debug)]
pub struct Authority {
    directory: PathBuf,
}

impl Authority {
    /// A new authority, whose files are kept below `directory`, which is created.
    pub fn new(directory: &Path) -> io::Result<Authority> {
        fs::create_dir_all(directory)?;
        let words = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"];
        certify(directory, ["ca-key.pem", "ca-cert.pem"], "tapline test authority", &words)?;
        Ok(Authority { directory: directory.to_owned() })
    }

    /// The directory of a server: its certificate for this host, its key, and the authority's certificate.
    pub fn server(&self) -> io::Result<PathBuf> {
        self.issue("server", &["-days", "2"])
    }

    /// The directory of a client.
    pub fn client(&self) -> io::Result<PathBuf> {
        self.issue("client", &["-days", "2"])
    }

    /// The directory of a client that has no certificate.
    pub fn anonymous(&self) -> io::Result<PathBuf> {
        let directory = self.directory.join("anonymous");
        fs::create_dir_all(&directory)?;
        fs::copy(self.directory.join("ca-cert.pem"), directory.join("ca-cert.pem"))?;
        Ok(directory)
    }

    /// Makes the server's certificate one that has expired.
    pub fn expire_server(&self) -> io::Result<()> {
        self.issue("server", &["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]).map(drop)
    }

    /// Revokes the certificate of the client; the list is in the server's directory.
    pub fn revoke_client(&self) -> io::Result<()> {
        let directory = self.directory.join("client");
        let ca = ["ca", "-config", "config", "-cert", "../ca-cert.pem", "-keyfile", "../ca-key.pem"];
        openssl(&directory, &[&ca[..], &["-revoke", "client-cert.pem"]].concat())?;
        openssl(&directory, &[&ca[..], &["-gencrl", "-out", "../server/ca-crl.pem"]].concat())
    }

    fn issue(&self, role: &str, validity: &[&str]) -> io::Result<PathBuf> {
        let request = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let directory = self.directory.join(role);
        fs::create_dir_all(&directory)?;
        fs::copy(self.directory.join("ca-cert.pem"), directory.join("ca-cert.pem"))?;
        let (key, asked) = (format!("{role}-key.pem"), format!("{role}-request.pem"));
        let subject = format!("/CN=tapline test {role}");
        openssl(&directory, &[&request[..], &["-keyout", &key, "-out", &asked, "-subj", &subject]].concat())?;
        let names = "subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n";
        fs::write(directory.join("extensions"), format!("{names}extendedKeyUsage={role}Auth\n"))?;
        // Unlike `x509 -req`, this can make certificates that have expired.
        fs::write(directory.join("index"), "")?;
        fs::write(directory.join("serial"), if role == "server" { "01" } else { "02" })?;
        fs::write(directory.join("crlnumber"), "01")?;
        fs::write(directory.join("config"), CONFIG)?;
        let certificate = format!("{role}-cert.pem");
        let signed = ["ca", "-batch", "-config", "config", "-extfile", "extensions", "-notext"];
        let by = ["-cert", "../ca-cert.pem", "-keyfile", "../ca-key.pem", "-in", &asked, "-out", &certificate];
        openssl(&directory, &[&signed[..], &by, validity].concat())?;
        Ok(directory)
    }
}

const CONFIG: &str = "[ca]\ndefault_ca=here\n[here]\ndatabase=index\nserial=serial\ncrlnumber=crlnumber\n\
                      new_certs_dir=.\ndefault_md=sha256\npolicy=any\ncrl_extensions=crl\ndefault_crl_days=2\n\
                      [any]\ncommonName=supplied\n[crl]\nauthorityKeyIdentifier=keyid:always\n";

/// Creates a key and a certificate of this name in these files; self-signed, unless an option names the issuer (`-CA`).
pub fn certify(directory: &Path, [key, certificate]: [&str; 2], name: &str, options: &[&str]) -> io::Result<()> {
    let make = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let subject = format!("/CN={name}");
    let files = ["-keyout", key, "-out", certificate, "-subj", &subject];
    openssl(directory, &[&make[..], &files, options].concat())
}

fn openssl(directory: &Path, words: &[&str]) -> io::Result<()> {
    let made = Command::new("openssl").args(words).current_dir(directory).output();
    let made = made.map_err(|error| io::Error::other(format!("openssl: {error}; `make prepare` installs it")))?;
    if made.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("openssl {words:?}: {}", String::from_utf8_lossy(&made.stderr))))
}

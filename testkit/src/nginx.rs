//! nginx, which serves a directory over HTTP and HTTPS to this host; `/to-http/` is redirected from HTTPS to HTTP.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running nginx. It is killed when this is dropped.
#[derive(Debug)]
pub struct Nginx {
    process: Child,
    files: PathBuf,
    ports: [u16; 2],
}

impl Nginx {
    /// Starts it with its files below `directory`; `certificates` has `server-cert.pem` and `server-key.pem`.
    pub fn start(directory: &Path, certificates: &Path) -> Nginx {
        let files = directory.join("www");
        fs::create_dir_all(&files).unwrap();
        // Both at once, so that they differ.
        let free = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = free.each_ref().map(|listener| listener.local_addr().unwrap().port());
        drop(free);
        let (room, keys) = (directory.display(), certificates.display());
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {room}/{name};\n"))
            .concat();
        let text = format!(
            "daemon off; master_process off; pid {room}/nginx.pid; error_log {room}/nginx.log;\nevents {{}}\nhttp {{\n\
             access_log {room}/nginx-access.log; {temporary}\
             server {{ listen 127.0.0.1:{}; root {room}/www; }}\n\
             server {{ listen 127.0.0.1:{} ssl; ssl_certificate {keys}/server-cert.pem; \
             ssl_certificate_key {keys}/server-key.pem; root {room}/www; \
             location /to-http/ {{ return 302 http://localhost:{}/full.raw; }} }}\n}}\n",
            ports[0], ports[1], ports[0]
        );
        let settings = directory.join("nginx.conf");
        fs::write(&settings, text).unwrap();
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("nginx");
        command.env("PATH", path).arg("-e").arg(directory.join("nginx.log")).arg("-c").arg(&settings);
        let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut process = started.unwrap_or_else(|error| panic!("nginx cannot be run (make prepare?): {error}"));
        for port in ports {
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                let log = || fs::read_to_string(directory.join("nginx.log"));
                assert_eq!(process.try_wait().unwrap(), None, "nginx has ended: {:?}", log());
                std::thread::yield_now();
            }
        }
        Nginx { process, files, ports }
    }

    /// The directory that it serves.
    pub fn files(&self) -> &Path {
        &self.files
    }

    /// The URL of a file over HTTP, of a host that the resolver must find.
    pub fn http(&self, name: &str) -> String {
        format!("http://localhost:{}/{name}", self.ports[0])
    }

    /// The URL of a file over HTTPS.
    pub fn https(&self, name: &str) -> String {
        format!("https://localhost:{}/{name}", self.ports[1])
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

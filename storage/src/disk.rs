//! The two questions to the file system: how much is free, how much is ours.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes that an unprivileged process may still write on the file system of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let c_path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all-zero bytes are a valid `statvfs`, a plain struct of integers.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `c_path` ends with a zero byte and `stat` is writable; both outlive the call.
    if unsafe { libc::statvfs(c_path.as_ptr(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The field widths differ between platforms.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast, reason = "not u64 everywhere")]
    Ok((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
}

/// Sum of the lengths of the files directly in `dir`; a file that vanishes meanwhile counts as nothing.
pub(crate) fn dir_bytes(dir: &Path) -> io::Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(dir)? {
        match entry?.metadata() {
            Ok(meta) if meta.is_file() => total += meta.len(),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(total)
}

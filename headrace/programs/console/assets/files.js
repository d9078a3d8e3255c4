// SPDX-License-Identifier: Apache-2.0
// A file of the reader's as a data: URL, which a request can carry.

export const asUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read`));
    reader.readAsDataURL(file);
  });
